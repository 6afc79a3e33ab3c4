"""The table of a preflight: what is wrong with each host, by its answer and the run's needs."""

from collections.abc import Iterable, Sequence

import msgspec

from launcher.columns import aligned
from launcher.errors import ExitCode, RefusedError
from launcher.hostlist import fold
from launcher.hostplan import PlannedHost
from launcher.hosts import HostEntry
from launcher.judging import judge
from launcher.options import Launcher, LaunchOptions
from launcher.plan import Plan
from launcher.preflight import Examined
from launcher.slurm_words import SlurmError
from launcher.ssh_causes import SshError
from launcher.verdicts import Case, Level, Verdict, Wanted
from relax_actor.errors import ConfigError, RelaxError
from relax_actor.survey import software
from relax_actor.survey.records import Facts


def verdicts(examined: Examined, plan: Plan | None = None) -> list[Verdict]:
    """Return the table: who could be reached, then every check.

    Args:
        examined: what the hosts answered.
        plan: of the run; None: nothing is known of what it needs.
    """
    table = [_refused(examined, host, error) for host, error in examined.refusals.items()]
    if not table and examined.wish.options.launcher is not Launcher.LOCAL:
        table = [Verdict(check=_way(examined), fact=f"{len(examined.facts)} hosts answered")]
    return table + (judge(_case(examined, plan)) if examined.facts else [])


def render(table: Sequence[Verdict], hosts: int, took_s: float) -> str:
    """Return the table as text, a hint under each line that is not good."""
    rows = [
        (
            verdict.level.value,
            verdict.check,
            f"{fold(verdict.hosts)}: {verdict.fact}" if verdict.hosts else verdict.fact,
        )
        for verdict in table
    ]
    lines = aligned(("", "", ""), rows)[1:]
    indent = " " * (lines[0].index(rows[0][2]) if rows else 0)
    shown = [f"preflight of {hosts} host{'s' if hosts != 1 else ''}, {took_s:.1f} s"]
    for line, verdict in zip(lines, table, strict=True):
        shown.append(f"  {line}".replace("\n", f"\n  {indent}"))
        if verdict.hint:
            shown.append(f"  {indent}hint: {verdict.hint}")
    return "\n".join(shown)


def render_examined(examined: Examined, table: Sequence[Verdict]) -> str:
    """Return the table of a preflight as text."""
    return render(table, len(examined.facts) + len(examined.refusals), examined.surveyed.took_s)


def refusal(table: Sequence[Verdict]) -> RefusedError | None:
    """Return what a table that has failures comes to; None where it has none."""
    failures = [verdict for verdict in table if verdict.level is Level.FAILURE]
    if not failures:
        return None
    hosts = tuple(dict.fromkeys(host for verdict in failures for host in verdict.hosts))
    count = f"{len(failures)} failure{'s' if len(failures) != 1 else ''}"
    fact = f"found {count} on {fold(hosts)}" if hosts else f"found {count}"
    hint = "each has its own hint in the table; --preflight off starts all the same"
    return RefusedError([ConfigError("--preflight", fact, hint)], ExitCode.PREFLIGHT)


def _case(examined: Examined, plan: Plan | None) -> Case:
    options, surveyed = examined.wish.options, examined.surveyed
    return Case(
        facts=examined.facts,
        wanted=_wanted(options, examined.facts, plan),
        unreached=surveyed.unreached,
        skew_s=surveyed.skew_s,
        here=None if options.launcher is Launcher.LOCAL else Facts(code=software.code_digest()),
        addresses={host.name: host.address for host in examined.hosts},
        run_dir=str(examined.wish.folder),
    )


def _wanted(options: LaunchOptions, hosts: Iterable[str], plan: Plan | None) -> dict[str, Wanted]:
    """Return what a run needs of each host, by its plan and by the host's own line."""
    lines = {entry.label: entry for entry in options.hosts}
    planned = {host.name: host for host in plan.hosts.hosts} if plan is not None else {}
    wanted = {}
    for host in hosts:
        line, place = lines.get(host, HostEntry(name=host)), planned.get(host)
        wanted[host] = Wanted(
            interface=line.interface or options.network.interface,
            named_gpus=line.gpus or (),
            slots=line.slots or 0,
        )
        if plan is not None and place is not None:
            wanted[host] = _with_plan(wanted[host], place, plan, options)
    return wanted


def _with_plan(wanted: Wanted, place: PlannedHost, plan: Plan, options: LaunchOptions) -> Wanted:
    is_alone = options.launcher is Launcher.LOCAL  # then `check_machine` looks at shared memory
    return msgspec.structs.replace(
        wanted,
        gpus=tuple(dict.fromkeys(gpu for gpus in place.actor_gpus.values() for gpu in gpus)),
        memory_bytes=place.memory_bytes,
        shm_bytes=0 if is_alone else place.shm_bytes,
        disk_bytes=plan.estimate.trainer_bytes if place == plan.hosts.hosts[0] else 0,
    )


def _refused(examined: Examined, host: str, error: RelaxError) -> Verdict:
    """Return the line of a host that did not answer."""
    fact, hint = str(error), ""
    if isinstance(error, SshError):
        evidence = f"\n{error.evidence}" if error.evidence else ""
        fact, hint = f"{error.fact}{evidence}", error.hint
    elif isinstance(error, SlurmError):
        fact, _, hint = str(error).partition("\n\nhint: ")
    return Verdict(check=_way(examined), level=Level.FAILURE, hosts=(host,), fact=fact, hint=hint)


def _way(examined: Examined) -> str:
    return "srun" if examined.wish.options.launcher is Launcher.SLURM else "ssh"
