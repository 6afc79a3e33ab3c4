"""Which actor of a run goes to which host, and to which of its GPUs. Pure.

The first host that may train has the trainer, and beside it, because rows are read in place, the queue, the
prompts and the rewards. Rollouts take what is left: each a set of GPUs of one host, or of each of the hosts
that it is spread over, or a slot where none needs a GPU. Sets that stay free are spares: a rollout, or a part
of one, whose host is lost goes there.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from launcher.hosts import HostEntry, HostRole
from launcher.options import GpuOptions, Layout, Order
from launcher.stalls import Needs, Room, Stall
from relax_actor.config import Config
from relax_actor.devices import CPU
from relax_actor.errors import ConfigError
from relax_actor.homes import is_part, members_of
from relax_actor.placement import Placement, Seat

TRAINER_GPUS = 1
"""Of backend `torch`, which trains on one."""


_Set: TypeAlias = tuple[int, tuple[str, ...]]  # which host, and which GPUs


class PlacementError(ConfigError):
    """The hosts have no place for an actor.

    Args:
        actor: who has none.
        fact: what is missing, naming the host.
        hint: what to do about it.
    """

    def __init__(self, actor: str, fact: str, hint: str) -> None:
        self.actor = actor
        super().__init__(actor, fact, hint)


def rooms(hosts: Iterable[HostEntry], found: Mapping[str, Sequence[str]]) -> tuple[Room, ...]:
    """Return what hosts have.

    Args:
        hosts: as they are named.
        found: for hosts that were asked, their GPUs; a host without any takes its slots as actors.
    """
    return tuple(_room(host, found.get(host.label)) for host in hosts)


def first_host(hosts: Sequence[HostEntry]) -> str:
    """Return the host that trains, as placements name it; empty where none may."""
    try:
        return _first(rooms(hosts, {})).host
    except PlacementError:
        return ""


def needs_of(config: Config, rooms: Sequence[Room], asked: GpuOptions, *, shares: bool = False) -> Needs:
    """Return what a run wants of its hosts.

    Args:
        config: the run's.
        rooms: of the hosts; `device = "auto"` is a GPU where some have any.
        asked: GPUs by number.
        shares: whether rollouts may share GPUs where there are too few.
    """
    some = any(room.gpus for room in rooms) or bool(asked.total or asked.train or asked.rollout)
    rollouts_compute = config.rollout.engine != "scripted" and _on_gpu(config.rollout.device, some=some)
    trains = _on_gpu(config.train.device, some=some)
    return Needs(
        replicas=config.rollout.replicas,
        gpus_each=gpus_each(config) // config.rollout.hosts_per_replica if rollouts_compute else 0,
        trainer_gpus=(asked.train or TRAINER_GPUS) if trains else 0,
        layout=asked.layout,
        order=asked.order,
        shares=shares and config.rollout.hosts_per_replica == 1,
        hosts_each=config.rollout.hosts_per_replica,
    )


def gpus_each(config: Config) -> int:
    """Return how many GPUs a rollout takes, on all its hosts together."""
    return max(1, getattr(config.rollout, "tensor_parallel", 1))  # of engines that spread a replica


def place(needs: Needs, rooms: Sequence[Room]) -> Placement:
    """Place a run.

    Args:
        needs: what is to be placed.
        rooms: at least one; the order is that in which hosts are filled.

    Raises:
        PlacementError: there is no place for an actor; names what is missing.
    """
    first = _first(rooms)
    hosts = [first, *(room for room in rooms if room is not first)]
    trainer = _trainer_seat(needs, first)
    kept = () if needs.layout is Layout.COLOCATE or _is_only_one(needs, rooms) else trainer.gpus
    stalls = [Stall(room, needs, kept if room is first else ()) for room in hosts]
    seats = _rollout_seats(needs, stalls)
    return Placement(
        hosts=tuple(room.host for room in hosts),
        seats=(trainer, *seats),
        spares=tuple(seat for stall in stalls for seat in stall.spares()),
    )


def store_hosts(placement: Placement) -> tuple[str, ...]:
    """Return the hosts with a store of policy versions: the trainer's, and those where rollouts may be."""
    used = {seat.host for seat in (*placement.seats, *placement.spares) if not is_part(seat.actor)}
    hosts = tuple(host for host in placement.hosts if host in used)
    on_gpus = any(seat.gpus for seat in placement.seats if seat.actor != "trainer")
    return hosts if len(hosts) > 1 or on_gpus else ()


def _room(host: HostEntry, found: Sequence[str] | None) -> Room:
    gpus = host.visible if found is None else _usable(host, tuple(found))
    return Room(host=host.label, role=host.role, gpus=gpus, slots=host.slots)


def _usable(host: HostEntry, found: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs that a host has and may be used; those that its line names are not disputed here."""
    if not found:
        return ()
    return host.gpus if host.gpus is not None else found[: host.slots]


def _on_gpu(device: str, *, some: bool) -> bool:
    return some if device == "auto" else device != CPU


def _first(rooms: Sequence[Room]) -> Room:
    """Return the host that trains: the first one reserved for it, else the first that is not for rollouts."""
    for wanted in (HostRole.TRAINER, None):
        for room in rooms:
            if room.role is wanted:
                return room
    fact = f"has no host: all {len(rooms)} are reserved for rollouts"
    raise PlacementError(
        "trainer", fact, "take role=rollout from one line of the hostfile, or give one role=trainer"
    )


def _trainer_seat(needs: Needs, room: Room) -> Seat:
    gpus = room.gpus
    if gpus is None or not needs.trainer_gpus:
        return Seat(actor="trainer", host=room.host)
    if len(gpus) < needs.trainer_gpus:
        fact = f"needs {_count(needs.trainer_gpus)} of {room.host}, which has {len(gpus)}"
        raise PlacementError("trainer", fact, "put a host with GPUs first, or set train.device=cpu")
    return Seat(actor="trainer", host=room.host, gpus=gpus[: needs.trainer_gpus])


def _is_only_one(needs: Needs, rooms: Sequence[Room]) -> bool:
    """Whether rollouts have to be on the trainer's GPU, the only one there is."""
    return needs.shares and sum(len(room.gpus or ()) for room in rooms) <= needs.trainer_gpus


def _rollout_seats(needs: Needs, stalls: Sequence[Stall]) -> list[Seat]:
    """Give each rollout its sets, then number them host by host, which people read more easily."""
    taken = sorted(_replicas(needs, stalls), key=lambda sets: sets[0][0])
    return [
        Seat(actor=actor, host=stalls[index].host, gpus=gpus)
        for replica, sets in enumerate(taken)
        for actor, (index, gpus) in zip(members_of(replica, needs.hosts_each), sets, strict=True)
    ]


def _replicas(needs: Needs, stalls: Sequence[Stall]) -> Iterator[list[_Set]]:
    """Yield host and GPUs of each rollout and its parts; a heap knows whose turn it is."""
    turns = [(_turn(needs, stall), index) for index, stall in enumerate(stalls) if stall.has_room]
    heapq.heapify(turns)
    sharing = [index for index, stall in enumerate(stalls) if stall.can_share]
    for replica in range(needs.replicas):
        if len(turns) >= needs.hosts_each:
            yield _taken(needs, stalls, turns)
        elif sharing:
            index = sharing[replica % len(sharing)]
            yield [(index, stalls[index].share())]
        else:
            raise _no_room(needs, f"rollout/{replica}", stalls)


def _taken(needs: Needs, stalls: Sequence[Stall], turns: list[tuple[tuple[int, int], int]]) -> list[_Set]:
    """Take a set of each of so many hosts as a rollout is spread over, whose turn it is."""
    indices = [heapq.heappop(turns)[1] for _ in range(needs.hosts_each)]
    sets = [(index, stalls[index].take()) for index in indices]
    for index in indices:
        if stalls[index].has_room:
            heapq.heappush(turns, (_turn(needs, stalls[index]), index))
    return sorted(sets)


def _turn(needs: Needs, stall: Stall) -> tuple[int, int]:
    """Return what orders hosts: their own order, or the fewest rollouts, then the most room, first."""
    if needs.order is Order.PACK:
        return (0, 0)
    return (stall.taken, 0 if stall.is_unknown else -stall.free)


def _no_room(needs: Needs, actor: str, stalls: Sequence[Stall]) -> PlacementError:
    largest = max(stalls, key=lambda stall: stall.free)
    if needs.hosts_each > 1:
        return _too_few_hosts(needs, actor, stalls)
    if needs.gpus_each:
        left = f"the largest free set is {largest.free} on {largest.host}" if largest.free else "none is free"
        fact = f"needs {_count(needs.gpus_each)} of one host; {left}"
        hint = f"lower rollout.replicas (now {needs.replicas}) or rollout.tensor_parallel, or add hosts"
        return PlacementError(actor, fact, hint)
    fact = f"needs a slot; the {len(stalls)} hosts have {sum(stall.taken for stall in stalls)}"
    return PlacementError(
        actor, fact, f"lower rollout.replicas (now {needs.replicas}), or raise slots= of a host"
    )


def _too_few_hosts(needs: Needs, actor: str, stalls: Sequence[Stall]) -> PlacementError:
    with_room = [stall.host for stall in stalls if stall.has_room]
    each = _count(needs.gpus_each) if needs.gpus_each else "a slot"
    have = (
        f"only {', '.join(with_room)} has"
        if len(with_room) == 1
        else f"{len(with_room)} of {len(stalls)} have"
    )
    fact = f"needs {needs.hosts_each} hosts with {each} each (rollout.hosts_per_replica); {have} so many free"
    hint = f"lower rollout.replicas (now {needs.replicas}) or rollout.hosts_per_replica, or add hosts"
    return PlacementError(actor, fact, hint)


def _count(gpus: int) -> str:
    return f"{gpus} GPU" + ("s" if gpus != 1 else "")
