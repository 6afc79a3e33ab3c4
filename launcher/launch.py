"""`relax-actor launch`: read, check, plan, lock the run folder, run, report.

The tree itself is `relax_actor.app`'s work; it runs in this process' main thread, which between its ticks
draws the display and derives the metrics. What signals do there is in `interrupts`.
"""

import os
import secrets
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec

from launcher import over_hosts
from launcher.console import Display
from launcher.errors import ExitCode, RefusedError, report
from launcher.interrupts import Control, Ended, catching
from launcher.machine_checks import check_machine
from launcher.metrics import MetricsWriter
from launcher.options import LaunchOptions, Rehearsal
from launcher.plan import plan_json, render, write_plan
from launcher.preflight_run import Survey
from launcher.preparing import Prepared, prepare
from launcher.remote_env import port_variable
from launcher.report import summary, write_reports
from launcher.runfolder import RunFolder, expand
from launcher.settings import Settings, is_no_path
from launcher.slurm_submit import SCRIPT, SlurmJob, prepare_job, submit
from launcher.taglog import TaggedLogs
from relax_actor.config import Config
from relax_actor.errors import ConfigError
from relax_actor.placement import Placement
from relax_actor.telemetry import read_events
from relax_actor.trainers.checkpoint import CheckpointError, CheckpointStore


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    config_path: Path | None = None
    overrides: tuple[str, ...] = ()
    flags: dict[str, str | None] = {}
    words: dict[str, Any] = {}  # about hosts, for `asking.ask`
    argv: tuple[str, ...] = ()  # all words behind the command's name, for a job that says them again
    dry_run: bool = False
    as_json: bool = False  # the plan, in a dry run
    tensorboard: bool = False
    tag_output: bool = False  # also print what actors write
    color: str = "auto"  # or `always` or `never`
    live: bool | None = None  # None: where the output is a terminal


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a runner gets."""

    config: Config
    folder: RunFolder
    run_id: str
    resume: Path | None
    on_tick: Callable[[], None]
    options: LaunchOptions
    placement: Placement | None  # None: this host alone, its GPUs as they are


Runner = Callable[[Job, Callable[[Control], None]], Ended]
"""Runs a job to its end; first hands its control over, so that signals reach it."""


def launch(request: Request, out: TextIO, runner: Runner | None = None) -> int:
    """Carry out a launch.

    Args:
        request: of the command line.
        out: where the display, the plan and the summary go.
        runner: what runs the actors; `relax_actor.app` if None.

    Returns:
        The exit code.

    Raises:
        RefusedError: nothing was started; exit code 2 or 3.
        RunFolderError: the folder is in use or cannot be made.
    """
    is_afar = request.words.get("--dry-run") == Rehearsal.REMOTE
    survey = Survey(out)
    prepared = prepare(
        request.config_path,
        request.overrides,
        request.flags,
        request.words,
        rehearse=request.dry_run and not is_afar,
        ask_hosts=survey.ask if is_afar or not request.dry_run else None,
    )
    settings, plan = prepared.settings, prepared.plan
    path = expand(settings.config.run.dir, name=settings.config.run.name, now=time.localtime())
    lacking = check_machine(settings.config, path, plan.estimate, settings.where, alone=prepared.is_alone)
    refusal = survey.judge(plan, as_json=request.as_json)
    if request.dry_run:
        code = _dry_run(request, prepared, lacking, out)
        if refusal is not None:
            raise refusal
        return code
    if refusal is not None:
        raise refusal
    if lacking:
        raise RefusedError(lacking, ExitCode.PREFLIGHT)
    folder = RunFolder.create(str(path), name="", logs=prepared.options.log_dir)
    if prepared.options.slurm.submit:
        submit(_job(request, prepared, path), folder, out)
        return ExitCode.DONE
    return _run(request, prepared, folder, (out, runner or _run_app))


def _job(request: Request, prepared: Prepared, path: Path) -> SlurmJob:
    return prepare_job(prepared.options, request.argv, name=prepared.settings.config.run.name, folder=path)


def _dry_run(request: Request, prepared: Prepared, lacking: Sequence[ConfigError], out: TextIO) -> int:
    plan, config = prepared.plan, prepared.settings.config
    out.write((plan_json(plan) if request.as_json else render(plan)) + "\n")
    path = expand(config.run.dir, name=config.run.name, now=time.localtime())
    script = _job(request, prepared, path).script if prepared.options.slurm.submit else ""
    if script and not request.as_json:
        out.write(f"\n{SCRIPT}\n{textwrap.indent(script, '  ')}")
    if lacking:
        sys.stderr.write(report(RefusedError(lacking)).replace("error: ", "warning: ") + "\n")
    if request.flags.get("--run-dir"):
        folder = RunFolder.create(config.run.dir, name=config.run.name)
        write_plan(plan, _in_folder(config, folder), folder)
        if script:
            (folder.path / SCRIPT).write_text(script, encoding="utf-8")
    return ExitCode.DONE


def _run(request: Request, prepared: Prepared, folder: RunFolder, shell: tuple[TextIO, Runner]) -> int:
    out, runner = shell
    settings = prepared.settings
    run_id = secrets.token_hex(4)
    os.environ.update(port_variable(prepared.options.network.ports))
    with folder.locked(run_id):
        resume = _resume(settings, folder)
        config = _in_folder(settings.config, folder)
        write_plan(prepared.plan, config, folder)
        begun_at = folder.events.stat().st_size if folder.events.exists() else 0
        with catching() as signals:
            with _watching(request, folder, out) as on_tick:
                job = Job(
                    config=config,
                    folder=folder,
                    run_id=run_id,
                    resume=resume,
                    on_tick=on_tick,
                    options=prepared.options,
                    placement=prepared.placement,
                )
                outcome = runner(job, signals.obey)
            events = read_events(folder.events, begun_at)[0]
            exit_code = over_hosts.exit_code(events, signals.exit_code(outcome))
            failures = write_reports(folder)
            for problem in over_hosts.problems(events, prepared.options):
                sys.stderr.write(f"{report(problem)}\n\n")
            with suppress(OSError):  # whoever read it has gone, or its disk is full: the run ended as it did
                out.write(
                    summary(folder, exit_code=exit_code, reason=outcome.reason, failures=failures) + "\n"
                )
                out.flush()
    return exit_code


def _in_folder(config: Config, folder: RunFolder) -> Config:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(folder.path)))


def _resume(settings: Settings, folder: RunFolder) -> Path | None:
    """Return the checkpoint to start from.

    Raises:
        RefusedError: the folder holds an earlier run, and nobody said what to do with it; or there is
            no checkpoint of that step.
    """
    wish = settings.config.run.resume
    if not is_no_path(wish):
        return Path(wish)
    if wish.isdecimal():
        return _of_step(settings, folder, int(wish))
    if wish == "auto":
        newest = CheckpointStore(folder.checkpoints).latest()
        return newest.path if newest else None
    if folder.events.exists():
        hint = "--resume auto goes on from its newest checkpoint; or give another --run-dir"
        fact = f"holds an earlier run: {folder.path}"
        raise RefusedError([ConfigError(settings.where("run.dir"), fact, hint)])
    return None


def _of_step(settings: Settings, folder: RunFolder, step: int) -> Path:
    try:
        return CheckpointStore(folder.checkpoints).open(step).path
    except CheckpointError as error:
        hint = "`auto` finds the newest one"
        problem = ConfigError(settings.where("run.resume"), f"is no whole checkpoint: {error}", hint)
        raise RefusedError([problem]) from None


@contextmanager
def _watching(request: Request, folder: RunFolder, out: TextIO) -> Iterator[Callable[[], None]]:
    """Yield what the run calls at every tick: it draws, and derives metrics, as often as is due."""
    offset = folder.events.stat().st_size if folder.events.exists() else 0
    live = out.isatty() if request.live is None else request.live
    metrics = MetricsWriter(
        folder.events, folder.metrics, tensorboard=folder.tensorboard if request.tensorboard else None
    )
    display = Display(folder.events, out, offset=offset, live=live, color=request.color)
    tagged = TaggedLogs(folder, out) if request.tag_output else None

    def on_tick() -> None:
        if tagged is not None:
            tagged.tick()
        if display.tick():
            metrics.poll()

    try:
        yield on_tick
    finally:
        if tagged is not None:
            tagged.close()
        display.close()
        metrics.poll()


def _run_app(job: Job, hand_over: Callable[[Control], None]) -> Ended:
    from relax_actor import app  # noqa: PLC0415 - heavy, and only a launch needs it

    control = app.RunControl()
    hand_over(control)
    reached = over_hosts.reach(job.options, job.folder.path, job.placement)
    return app.run(
        job.config,
        job.folder.path,
        run_id=job.run_id,
        resume=job.resume,
        on_tick=job.on_tick,
        control=control,
        hosts=reached.hosts,
        placement=job.placement,
        address=reached.address,
        fan_out=job.options.ssh.fanout,
        env={} if reached.hosts else dict(job.options.remote.env),
    )
