"""What follows from what hosts said of themselves: whether a run can go on there. Pure.

Each check looks at all hosts and returns what is wrong; `judge` adds a line for each that found nothing.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from launcher import judging_hosts as hosts
from launcher import judging_ways as ways
from launcher.verdicts import Case, Verdict


def judge(case: Case) -> list[Verdict]:
    """Return the whole table, in the order of the checks."""
    table: list[Verdict] = []
    for check, (find, summary) in _CHECKS.items():
        if check in _BETWEEN and len(case.facts) < 2 and case.here is None:
            continue
        found = [msgspec.structs.replace(verdict, check=check) for verdict in _merged(find(case))]
        table += found or [Verdict(check=check, fact=summary(case))]
    return table


def _merged(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Put hosts of which the same is to be said into one line."""
    merged: dict[Verdict, list[str]] = {}
    for verdict in verdicts:
        key = msgspec.structs.replace(verdict, hosts=())
        merged.setdefault(key, []).extend(verdict.hosts)
    return [msgspec.structs.replace(key, hosts=tuple(hosts)) for key, hosts in merged.items()]


def _nothing(_case: Case) -> Iterator[Verdict]:
    return iter(())


_BETWEEN = frozenset({"run folder", "host name", "interface", "network", "proxies", "clock"})
"""Checks that mean nothing where this host is the only one."""

_Find = Callable[[Case], Iterable[Verdict]]
_CHECKS: dict[str, tuple[_Find, Callable[[Case], str]]] = {
    "software": (hosts.software, hosts.software_of),
    "driver": (hosts.driver, hosts.driver_of),
    "GPUs": (hosts.gpus, hosts.gpus_of),
    "memory": (hosts.memory, hosts.memory_of),
    "shared memory": (hosts.shared_memory, hosts.shared_memory_of),
    "limits": (hosts.limits, hosts.limits_of),
    "disk": (hosts.disk, hosts.disk_of),
    "run folder": (_nothing, hosts.run_folder_of),
    "host name": (ways.host_names, lambda _: "leads to no loopback"),
    "interface": (ways.interfaces, lambda _: "up"),
    "network": (ways.ways, lambda _: "every way that was tried"),
    "proxies": (ways.proxies, lambda _: "none in between"),
    "files": (ways.paths, ways.paths_of),
    "clock": (ways.clocks, ways.clocks_of),
    "leftovers": (ways.leftovers, lambda _: "none"),
}
