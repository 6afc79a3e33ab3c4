"""The preflight of one command: asked before hosts have actors, judged once it is known which."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from launcher.asking import ask
from launcher.errors import RefusedError
from launcher.machine_checks import check_machine
from launcher.options import Launcher, LaunchOptions, Preflight, Rehearsal
from launcher.plan import Plan
from launcher.preflight import Examined, Wish, examine, is_wanted
from launcher.preflight_table import refusal, render_examined, verdicts
from launcher.preparing import prepare
from launcher.runfolder import expand
from launcher.settings import Settings
from launcher.slurm_hosts import in_allocation
from launcher.verdicts import Level, Verdict
from relax_actor.errors import ConfigError


class Survey:
    """What a launch asks of its hosts, and what it says of them.

    Args:
        out: where the table goes.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._examined: Examined | None = None

    def ask(self, settings: Settings, options: LaunchOptions) -> Mapping[str, Sequence[str]]:
        """Ask all hosts, if they are to be asked; return their GPUs.

        Raises:
            RefusedError: some do not answer, so that nothing can be placed on them.
        """
        if not is_wanted(options):
            return {}
        wish = Wish(
            options=options,
            config=settings.config,
            folder=_folder_of(settings),
            is_full=options.preflight is Preflight.FULL,
        )
        self._examined = examine(wish)
        if self._examined.refusals:
            refused = self.judge(None)
            assert refused is not None  # noqa: S101 - each of them is a failure
            raise refused
        return self._examined.gpus if options.launcher is not Launcher.LOCAL else {}

    def judge(self, plan: Plan | None, *, as_json: bool = False) -> RefusedError | None:
        """Say what was found, if anything is wrong or somebody wants to see it; return what it comes to.

        Args:
            plan: of the run.
            as_json: whether the output is for a program: then nothing is said.
        """
        if self._examined is None:
            return None
        options = self._examined.wish.options
        table = verdicts(self._examined, plan)
        if options.preflight is Preflight.OFF and options.rehearsal is not Rehearsal.REMOTE and plan:
            return None
        is_good = all(verdict.level is Level.OK for verdict in table)
        is_asked_for = options.rehearsal is Rehearsal.REMOTE or options.preflight is Preflight.FULL
        if (is_asked_for or not is_good) and not as_json:
            self._out.write(f"{render_examined(self._examined, table)}\n\n")
            self._out.flush()
        return refusal(table)


def doctor(
    config_path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, str | None],
    words: Mapping[str, Any],
    out: TextIO,
    *,
    is_full: bool,
    as_json: bool = False,
) -> None:
    """Ask hosts and print the table, whatever is in it; with a configuration also whether they fit the run.

    Args:
        config_path: see `settings.read`, as for the next two.
        overrides: the same.
        flags: the same.
        words: about hosts; see `asking.ask`.
        out: where to.
        is_full: every byte of what is read, and every way between hosts.
        as_json: print one JSON object.

    Raises:
        RefusedError: the request is wrong (2), or hosts cannot run it (3).
    """
    names_a_run = config_path is not None or bool(overrides) or any(flags.values())
    if names_a_run:
        examined, table = _of_a_run(config_path, overrides, flags, words, is_full=is_full)
    else:
        options = in_allocation(ask(words, os.environ), os.environ)
        examined = examine(Wish(options=options, folder=Path.cwd() / "runs", is_full=is_full))
        table = verdicts(examined)
    if as_json:
        out.write(_json(examined, table) + "\n")
    else:
        out.write(render_examined(examined, table) + "\n")
    out.flush()
    if (refused := refusal(table)) is not None:
        raise refused


def _of_a_run(
    config_path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, str | None],
    words: Mapping[str, Any],
    *,
    is_full: bool,
) -> tuple[Examined, list[Verdict]]:
    found: list[Examined] = []

    def ask_hosts(settings: Settings, options: LaunchOptions) -> Mapping[str, Sequence[str]]:
        wish = Wish(options=options, config=settings.config, folder=_folder_of(settings), is_full=is_full)
        found.append(examine(wish))
        if found[0].refusals:
            raise _UnplaceableError
        return found[0].gpus if options.launcher is not Launcher.LOCAL else {}

    try:
        prepared = prepare(config_path, overrides, flags, words, ask_hosts=ask_hosts)
    except _UnplaceableError:
        return found[0], verdicts(found[0])
    settings, plan = prepared.settings, prepared.plan
    lacking = check_machine(
        settings.config, _folder_of(settings), plan.estimate, settings.where, alone=prepared.is_alone
    )
    return found[0], [*map(_verdict_of, lacking), *verdicts(found[0], plan)]


class _UnplaceableError(Exception):
    """Some hosts do not answer: nothing can be planned, but all can be told."""


def _verdict_of(problem: ConfigError) -> Verdict:
    fact = f"`{problem.where}` {problem.fact}"
    return Verdict(check="this machine", level=Level.FAILURE, fact=fact, hint=problem.hint)


def _folder_of(settings: Settings) -> Path:
    run = settings.config.run
    return expand(run.dir, name=run.name, now=time.localtime())


def _json(examined: Examined, table: Sequence[Verdict]) -> str:
    found = {"took_s": examined.surveyed.took_s, "table": table, "hosts": examined.facts}
    return msgspec.json.encode(found).decode()
