"""Preflight: all hosts are asked at once; `preflight_table` says what is wrong with each.

Who is asked depends on the launch: hosts of ssh and of Slurm through their sessions, this host, where it is
the only one, in this process. Nothing is started and nothing stays.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from launcher.hosts import HostEntry
from launcher.judging_hosts import usable_gpus
from launcher.options import Launcher, LaunchOptions, Preflight, Rehearsal
from launcher.over_hosts import Reached, address_of, explained, reach
from launcher.placing import first_host
from launcher.probes import Terms
from launcher.probing import Surveyed, survey
from launcher.runfolder import RunFolder
from launcher.ssh_causes import SshError
from relax_actor.config import Config
from relax_actor.errors import RelaxError
from relax_actor.supervision.hosts import LOCAL, Host
from relax_actor.survey import files
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
