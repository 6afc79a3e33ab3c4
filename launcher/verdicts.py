"""What is known when hosts are judged, and what is said of them then. Records and their words; pure."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from launcher.columns import size
from relax_actor.survey.records import Facts


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warn"
    FAILURE = "FAIL"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    check: str
    level: Level = Level.OK
    hosts: tuple[str, ...] = ()  # empty: all of them
    fact: str = ""
    hint: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs of one host; empty or 0 where it needs nothing, or nobody knows."""

    gpus: tuple[str, ...] = ()  # by number or UUID
    memory_bytes: int = 0
    shm_bytes: int = 0
    disk_bytes: int = 0
    interface: str = ""
    named_gpus: tuple[str, ...] = ()  # by its line of the hostfile
    slots: int = 0  # the same


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known when hosts are judged."""

    facts: Mapping[str, Facts]  # of hosts that answered, in the order in which they are used
    wanted: Mapping[str, Wanted] = {}
    unreached: Mapping[str, Mapping[str, str]] = {}  # host -> other host -> why there is no way
    skew_s: Mapping[str, float] = {}
    here: Facts | None = None  # of this process; None: it is one of the hosts
    addresses: Mapping[str, str] = {}  # where the others reach each host
    shm_option: str = "queue.storage_path"
    run_dir: str = ""

    def want(self, host: str) -> Wanted:
        """Return what a run needs of a host."""
        return self.wanted.get(host, Wanted())


def fail(host: str, fact: str, hint: str) -> Verdict:
    """Say that a run cannot go on on a host."""
    return Verdict(check="", level=Level.FAILURE, hosts=(host,), fact=fact, hint=hint)


def warn(host: str, fact: str, hint: str) -> Verdict:
    """Say what is odd about a host."""
    return Verdict(check="", level=Level.WARNING, hosts=(host,), fact=fact, hint=hint)


def least(sizes: Iterable[int]) -> str:
    """Say how much all have."""
    return f"{size(min(sizes, default=0))} free or more"


def listed(names: Iterable[str]) -> str:
    """Return names as a person writes them down."""
    return ", ".join(names) or "none"
