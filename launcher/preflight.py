"""Preflight: all hosts are asked at once, and one table says what is wrong with each.

Who is asked depends on the launch: hosts of ssh and of Slurm through their sessions, this host, where it is
the only one, in this process. Nothing is started and nothing stays.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from launcher.columns import aligned
from launcher.errors import ExitCode, RefusedError
from launcher.hostlist import fold
from launcher.hostplan import PlannedHost
from launcher.hosts import HostEntry
from launcher.judging import judge
from launcher.judging_hosts import usable_gpus
from launcher.options import Launcher, LaunchOptions, Preflight, Rehearsal
from launcher.over_hosts import Reached, address_of, explained, reach
from launcher.placing import first_host
from launcher.plan import Plan
from launcher.probing import Surveyed, Terms, survey
from launcher.runfolder import RunFolder
from launcher.slurm_words import SlurmError
from launcher.ssh_causes import SshError
from launcher.verdicts import Case, Level, Verdict, Wanted
from relax_actor.config import Config
from relax_actor.errors import ConfigError, RelaxError
from relax_actor.supervision.hosts import LOCAL, Host
from relax_actor.survey import files, software
from relax_actor.survey.host import facts_of
from relax_actor.survey.records import Facts, Question, Targets
from relax_actor.survey.wires import Listener

HEAD = "the head"
"""What this program is called where hosts try to reach it."""

QUICK_S, FULL_S = 120.0, 3600.0
"""How long one answer may take; a full digest reads every byte of the model."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be asked."""

    options: LaunchOptions
    config: Config | None = None  # None: of the hosts alone
    folder: Path  # the run folder, which need not be there
    is_full: bool = False


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """What the hosts answered."""

    wish: Wish
    facts: dict[str, Facts] = {}  # in the order of the hosts
    refusals: dict[str, RelaxError] = {}  # of hosts that did not answer
    surveyed: Surveyed = Surveyed()
    hosts: tuple[Host, ...] = ()

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        """The GPUs of each host that answered."""
        return {host: usable_gpus(facts) for host, facts in self.facts.items()}


def is_wanted(options: LaunchOptions) -> bool:
    """Whether hosts are asked before anything starts; some have to be, for their GPUs."""
    if options.slurm.submit or options.rehearsal is Rehearsal.LOCAL:
        return False
    if options.rehearsal is Rehearsal.REMOTE:
        return True
    if options.launcher is Launcher.LOCAL:
        return options.preflight is Preflight.FULL
    asks = any(entry.visible is None for entry in options.hosts)
    return options.preflight is not Preflight.OFF or asks


def examine(wish: Wish) -> Examined:
    """Ask all hosts of a launch; see `Wish`."""
    since = time.monotonic()
    with _canary(wish.folder) as (shared_file, shared_text):
        common = Question(
            is_full=wish.is_full,
            run_dir=str(wish.folder),
            shm_root=wish.config.queue.storage_path if wish.config else Question().shm_root,
            shared_file=shared_file,
            shared_text=shared_text,
            ports=wish.options.network.ports,
            run_ids=_earlier(wish.folder),
        )
        if wish.options.launcher is Launcher.LOCAL:
            facts = facts_of(msgspec.structs.replace(common, paths=_paths(wish.config, is_first=True)))
            took = Surveyed(took_s=time.monotonic() - since)
            return Examined(wish=wish, facts={LOCAL.name: facts}, surveyed=took)
        return _over_hosts(wish, common)


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


def _over_hosts(wish: Wish, common: Question) -> Examined:
    options, refusals = _known(wish.options)
    reached = reach(options, wish.folder, None) if options.hosts else Reached()
    first = first_host(wish.options.hosts)
    questions = {
        host.name: msgspec.structs.replace(
            common,
            shm_root=host.shm_root or common.shm_root,
            run_dir=host.run_dir or common.run_dir,
            paths=_paths(wish.config, is_first=host.name == first),
            listens=True,
        )
        for host in reached.hosts
    }
    terms = Terms(
        fanout=options.ssh.fanout,
        open_s=Terms().open_s + options.ssh.connect_timeout_s,
        answer_s=FULL_S if wish.is_full else QUICK_S,
        head=reached.address,
    )
    listener = Listener(options.network.ports)
    try:
        ways = _Ways(reached, listener.port, first, is_full=wish.is_full)
        surveyed = survey(reached.hosts, questions, ways.targets, terms)
    finally:
        listener.close()
    refusals |= {name: explained(attempt, options) for name, attempt in surveyed.attempts.items()}
    order = [entry.label for entry in wish.options.hosts]
    return Examined(
        wish=wish,
        facts={name: surveyed.facts[name] for name in order if name in surveyed.facts},
        refusals={name: refusals[name] for name in order if name in refusals},
        surveyed=surveyed,
        hosts=reached.hosts,
    )


def _known(options: LaunchOptions) -> tuple[LaunchOptions, dict[str, RelaxError]]:
    """Tell hosts whose names lead somewhere from those whose names do not."""
    if options.launcher is not Launcher.SSH:
        return options, {}
    known: list[HostEntry] = []
    refusals: dict[str, RelaxError] = {}
    for entry in options.hosts:
        try:
            address_of(entry, options.ssh)
            known.append(entry)
        except SshError as error:
            refusals[entry.label] = error
    return msgspec.structs.replace(options, hosts=tuple(known)), refusals


class _Ways:
    """Which host tries to reach which others: all of them, or in haste only the first and the head."""

    def __init__(self, reached: Reached, port: int, first: str, *, is_full: bool) -> None:
        self._addresses = {host.name: host.address for host in reached.hosts}
        self._far = {host.name for host in reached.hosts if host.prefix}
        self._head = (reached.address, port)
        self._first, self._is_full = first, is_full

    def targets(self, facts: Mapping[str, Facts]) -> dict[str, Targets]:
        """Say where each host is to try to connect to."""
        return {
            name: Targets(addresses=dict(self._of(name, facts)))
            for name in facts
            if len(facts) > 1 or name in self._far
        }

    def _of(self, name: str, facts: Mapping[str, Facts]) -> Iterator[tuple[str, tuple[str, int]]]:
        if name in self._far:
            yield HEAD, self._head
        for other, found in facts.items():
            is_tried = self._is_full or self._first in {name, other}
            if other != name and is_tried:
                yield other, (self._addresses[other], found.port)


@contextmanager
def _canary(folder: Path) -> Iterator[tuple[str, str]]:
    """Write a file that hosts which share the folder can see; yield its path and its text."""
    text = secrets.token_hex(16)
    file = files.nearest(str(folder)) / f".relax-actor-{text[:8]}.seen"
    try:
        with suppress(OSError):
            file.write_text(text)
        yield str(file), text
    finally:
        with suppress(OSError):
            file.unlink()


def _earlier(folder: Path) -> tuple[str, ...]:
    """Return the id of the run that was in a folder before, if its head is gone."""
    holder = RunFolder(folder).holder()
    return () if holder is None or holder.is_alive else (holder.run_id,)


def _paths(config: Config | None, *, is_first: bool) -> dict[str, str]:
    """Return what a host has to read: the model, and the first one the prompts."""
    if config is None:
        return {}
    paths = {"model.path": config.model.path}
    if is_first:
        own = {
            "data.path": config.data.path,
            "data.prefix_path": config.data.prefix_path,
            "eval.path": config.eval.path,
        }
        paths |= {option: path for option, path in own.items() if path}
    return paths


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
