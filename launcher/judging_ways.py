"""What is wrong between hosts: how they reach one another, what they read, what is left on them. Pure.

As in `judging_hosts`.
"""

from collections.abc import Iterator, Sequence

from launcher.columns import size
from launcher.hostlist import fold
from launcher.verdicts import Case, Level, Verdict, fail, listed, warn

MUCH_SKEW_S = 2.0
SHOWN = 5
"""Of a list that may be long."""

_IFNAME = "correct --ifname, or ifname= of its line"


def host_names(case: Case) -> Iterator[Verdict]:
    """Find hosts whose own name leads to the loopback."""
    for host, facts in case.facts.items():
        if facts.loopback_line and len(case.facts) > 1:
            fact = f"its name {facts.node} leads to itself: `{facts.loopback_line}` in /etc/hosts"
            hint = "libraries that ask for their own name find the loopback: give it its address there"
            yield warn(host, fact, hint)


def interfaces(case: Case) -> Iterator[Verdict]:
    """Find network interfaces that are missing, down, or without an address."""
    for host, facts in case.facts.items():
        wanted = case.want(host).interface
        there = {each.name: each for each in facts.interfaces}
        up = listed(each.name for each in facts.interfaces if each.is_up)
        if wanted and wanted not in there:
            yield fail(host, f"has no interface {wanted}; up are {up}", _IFNAME)
        elif wanted and not there[wanted].is_up:
            yield fail(host, f"interface {wanted} is down; up are {up}", f"ip link set {wanted} up")
        elif wanted and not there[wanted].addresses:
            yield fail(host, f"interface {wanted} has no address", _IFNAME)


def ways(case: Case) -> Iterator[Verdict]:
    """Find hosts that cannot reach one another."""
    by_reason: dict[str, list[tuple[str, str]]] = {}
    for host, failures in case.unreached.items():
        for other, why in failures.items():
            by_reason.setdefault(why, []).append((host, other))
    hint = "a firewall? --port-range, --ifname, or addr= of a line say which way to take"
    for why, pairs in by_reason.items():
        shown = ", ".join(f"{host} → {_at(case, other)}" for host, other in pairs[:SHOWN])
        more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
        hosts = tuple(dict.fromkeys(host for host, _ in pairs))
        fact = f"{shown}{more}: {why}"
        yield Verdict(check="", level=Level.FAILURE, hosts=hosts, fact=fact, hint=hint)


def _at(case: Case, host: str) -> str:
    address = case.addresses.get(host, "")
    return f"{host} ({address})" if address and address != host else host


def proxies(case: Case) -> Iterator[Verdict]:
    """Find proxies that would stand between hosts."""
    for host, facts in case.facts.items():
        missing = [name for name in case.addresses.values() if name and not _is_spared(name, facts.no_proxy)]
        if facts.proxies and missing and len(case.facts) > 1:
            fact = f"{listed(facts.proxies)} would stand before {fold(dict.fromkeys(missing))}"
            yield warn(host, fact, "name them in no_proxy there")


def _is_spared(host: str, spared: Sequence[str]) -> bool:
    return any(each in {"*", host} or host.endswith("." + each.lstrip(".")) for each in spared)


def paths(case: Case) -> Iterator[Verdict]:
    """Find files that cannot be read, or differ."""
    reference: dict[str, tuple[str, str]] = {}
    for host, facts in case.facts.items():
        for option, path in facts.paths.items():
            first, digest = reference.setdefault(option, (host, path.digest))
            if path.error:
                hint = "put it there at the same path, or on a folder that all hosts share"
                yield fail(host, f"{option} cannot be read: {path.error}", hint)
            elif digest and path.digest != digest:
                hint = f"copy it anew: rsync -a {first}:…"
                yield fail(host, f"{option} is another one than on {first}", hint)


def paths_of(case: Case) -> str:
    """Say what was read."""
    paths = {option: fact for facts in case.facts.values() for option, fact in facts.paths.items()}
    said = [f"{option} {size(fact.size_bytes)} ({fact.digest[:8]})" for option, fact in paths.items()]
    return ", ".join(said) or "nothing was asked"


def clocks(case: Case) -> Iterator[Verdict]:
    """Find clocks that are far off."""
    for host, skew_s in case.skew_s.items():
        if abs(skew_s) > MUCH_SKEW_S:
            way = "ahead" if skew_s > 0 else "behind"
            hint = "nothing depends on it, but times in logs do not fit one another: chronyc tracking"
            yield warn(host, f"its clock is {abs(skew_s):.1f} s {way}", hint)


def clocks_of(case: Case) -> str:
    """Say how far clocks are off."""
    return f"within {max(map(abs, case.skew_s.values()), default=0.0):.1f} s"


def leftovers(case: Case) -> Iterator[Verdict]:
    """Find what an earlier run in the same folder still has."""
    for host, facts in case.facts.items():
        if facts.leftovers:
            shown = ", ".join(facts.leftovers[:SHOWN])
            more = len(facts.leftovers) - SHOWN
            fact = f"the earlier run is still there: {shown}{f' and {more} more' if more > 0 else ''}"
            yield fail(host, fact, f"relax-actor stop {case.run_dir or 'RUN'}, or wait for its leases to end")
