"""The part of a plan about hosts: who runs where, how agents get there, what each needs. Asks nobody.

Values of variables are secrets and never in it. On paper, hosts that differ in their number alone are one
line; plan.json and `--json` have each of them.
"""

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from launcher.columns import aligned, size
from launcher.estimate import Estimate
from launcher.hostlist import fold
from launcher.options import LaunchOptions
from launcher.placing import store_hosts
from launcher.stalls import Room
from relax_actor.homes import ROLLOUT, is_part
from relax_actor.placement import Placement
from transport.ports import VARIABLE

HIDDEN = "***"
ASKED = "asked at the start"
_WIDTH = 80


class PlannedHost(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a run."""

    name: str
    gpus: tuple[str, ...] | None  # those that may be used; None: asked at the start
    actors: tuple[str, ...]
    actor_gpus: dict[str, tuple[str, ...]]  # of actors that have any
    spare_rollouts: int  # more of them have room here, where another host is lost
    memory_bytes: int  # trainer and rollouts
    shm_bytes: int  # policy versions, and the queue's samples


class HostsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All hosts of a run."""

    launcher: str = "local"
    hosts: tuple[PlannedHost, ...] = ()  # none: this host alone, or an allocation that is asked at the start
    python: str = ""  # on other hosts; empty: as here
    workdir: str = ""
    env: dict[str, str] = {}  # names of the variables that actors get; values are hidden
    interface: str = ""  # empty: by the route to the peers
    master_addr: str = ""  # empty: by the route to the peers
    ports: str = "the kernel's choice"


def plan_hosts(
    options: LaunchOptions,
    rooms: Sequence[Room],
    placement: Placement | None,
    actors: Sequence[str],
    need: Estimate,
) -> HostsPlan:
    """Work out which host has what.

    Args:
        options: about hosts.
        rooms: what is known of each.
        placement: where each actor goes; None: not known yet.
        actors: all of a run, as `ps` names them.
        need: of memory.
    """
    ports = options.network.ports
    return HostsPlan(
        launcher=options.launcher.value,
        hosts=() if placement is None else tuple(_hosts(rooms, placement, actors, need)),
        python=options.remote.python,
        workdir=options.remote.workdir,
        env={name: HIDDEN for name, _ in options.remote.env if name != VARIABLE},
        interface=options.network.interface,
        master_addr=options.network.master_addr,
        ports=f"{ports[0]}-{ports[1]}" if ports else HostsPlan().ports,
    )


def render_hosts(plan: HostsPlan) -> list[str]:
    """Return the hosts as lines of at most 80 columns; none where nothing was said of any."""
    if not plan.hosts:
        return [f"hosts ({plan.launcher}: those of the allocation)"] if plan.launcher != "local" else []
    lines = [f"hosts ({plan.launcher}, {len(plan.hosts)})"]
    lines += [f"  {line}" for line in _sizes(plan.hosts)]
    if plan.env:
        lines += [_line("variables", " ".join(f"{name}={value}" for name, value in plan.env.items()))]
    if plan.launcher != "local":
        lines += [
            _line("python", plan.python or "as here"),
            _line("folder", plan.workdir or "as here"),
            _line("network", f"{plan.interface or 'by the route to the peers'}, ports {plan.ports}"),
        ]
    lines += ["", "placement", *(f"  {line}" for line in _places(plan.hosts))]
    return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines]


def _hosts(
    rooms: Sequence[Room], placement: Placement, actors: Sequence[str], need: Estimate
) -> Iterator[PlannedHost]:
    stores = {host: f"store-{index}" for index, host in enumerate(store_hosts(placement))}
    seated: dict[str, list[str]] = {host: [] for host in placement.hosts}
    gpus: dict[str, dict[str, tuple[str, ...]]] = {host: {} for host in placement.hosts}
    spares = dict.fromkeys(placement.hosts, 0)
    places = {seat.actor: seat for seat in placement.seats}
    for name in actors:
        host = places[name].host if name in places else placement.hosts[0]
        seated[host].append(name)
        if name in places and places[name].gpus:
            gpus[host][name] = places[name].gpus
    for spare in placement.spares:
        spares[spare.host] += 1
    known = {room.host: room.gpus for room in rooms}
    hosts_each = 1 + sum(map(is_part, actors)) // max(
        1, sum(name.startswith(f"{ROLLOUT}/") for name in actors)
    )
    for host in placement.hosts:
        first = host == placement.hosts[0]
        members = sum(map(_samples, seated[host]))
        yield PlannedHost(
            name=host,
            gpus=known[host],
            actors=(*seated[host], *((stores[host],) if host in stores else ())),
            actor_gpus=gpus[host],
            spare_rollouts=spares[host],
            memory_bytes=members * need.rollout_bytes // hosts_each + first * need.trainer_bytes,
            shm_bytes=need.policy_bytes * (first or host in stores) + need.queue_bytes * first,
        )


def _sizes(hosts: Sequence[PlannedHost]) -> list[str]:
    """Return what each host has and what is needed of it, hosts that are alike in one line."""
    header = ("host", "GPUs", "memory", "shared memory")
    groups = itertools.groupby(hosts, key=lambda host: (host.gpus, host.memory_bytes, host.shm_bytes))
    rows = [
        (
            fold(host.name for host in alike),
            _gpus(first.gpus),
            size(first.memory_bytes),
            size(first.shm_bytes),
        )
        for _, (first, *others) in groups
        for alike in [(first, *others)]
    ]
    return aligned(header, rows, right=frozenset(header[2:]))


def _places(hosts: Sequence[PlannedHost]) -> list[str]:
    """Return which actor is where, hosts that are alike in one line."""
    groups = [list(alike) for _, alike in itertools.groupby(hosts, key=_kind)]
    return aligned(("host", "GPUs", "actors"), [row for alike in groups for row in _rows(alike)])


def _kind(host: PlannedHost) -> tuple[object, ...]:
    """Return what hosts have to share to be shown as one."""
    return ([name.rstrip("0123456789") for name in host.actors], list(host.actor_gpus.values()))


def _rows(alike: Sequence[PlannedHost]) -> list[tuple[str, str, str]]:
    """Return rows for hosts that are alike: rollouts, the trainer if it has a GPU, all others."""
    names = fold(host.name for host in alike)
    busy = frozenset(name for host in alike for name in host.actor_gpus)
    roles: dict[str, list[str]] = {}
    for name in (name for host in alike for name in host.actors):
        role = name.partition("/")[0] if name in busy or _samples(name) else ""
        roles.setdefault(role, []).append(name)
    return [(names, _gpus_of(alike, actors), fold(actors)) for actors in roles.values()]


def _samples(actor: str) -> bool:
    """Whether it has a replica's weights, or a share of them."""
    return is_part(actor) or actor.startswith(f"{ROLLOUT}/")


def _gpus_of(alike: Sequence[PlannedHost], actors: Sequence[str]) -> str:
    """Return the GPUs of actors of one role on each host, those of each actor in brackets of their own."""
    sets = [alike[0].actor_gpus[name] for name in actors if name in alike[0].actor_gpus]
    if all(len(gpus) == 1 for gpus in sets):
        return _listed([gpu for gpus in sets for gpu in gpus])
    return " ".join(f"[{_listed(gpus)}]" for gpus in sets)


def _gpus(gpus: tuple[str, ...] | None) -> str:
    return ASKED if gpus is None else _listed(gpus) or "-"


def _listed(gpus: Sequence[str]) -> str:
    """Return numbers with ranges, and other names as they are."""
    return fold(gpus).strip("[]") if all(gpu.isdigit() for gpu in gpus) else ",".join(gpus)


def _line(title: str, text: str) -> str:
    return f"  {title:<12} {text}"
