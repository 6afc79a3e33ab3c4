"""Which actor of a run goes to which host, and to which of its GPUs. Pure.

The first host that may train has the trainer, and beside it, because rows are read in place, the queue, the
prompts and the rewards. Rollouts take what is left: each a set of GPUs of one host, or a slot of one where
none needs a GPU. Sets that stay free are spares: a rollout whose host is lost goes there.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from launcher.hosts import HostEntry, HostRole
from launcher.options import GpuOptions, Layout, Order
from relax_actor.config import Config
from relax_actor.devices import CPU
from relax_actor.errors import ConfigError
from relax_actor.placement import Placement, Seat

TRAINER_GPUS = 1
"""Of backend `torch`, which trains on one."""


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


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a host has for actors."""

    host: str  # as placements name it
    role: HostRole | None = None
    gpus: tuple[str, ...] | None = None  # None: not known, the host is asked when a run starts
    slots: int | None = None  # rollouts it takes where they need no GPU; None: any number


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a run wants to place."""

    replicas: int
    gpus_each: int = 0  # of one rollout, all of one host; 0: none
    trainer_gpus: int = 0
    layout: Layout = Layout.SEPARATE
    order: Order = Order.SPREAD
    shares: bool = (
        False  # rollouts take GPUs in turn where there are too few, and the trainer's if it has the only one
    )


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
        gpus_each=gpus_each(config) if rollouts_compute else 0,
        trainer_gpus=(asked.train or TRAINER_GPUS) if trains else 0,
        layout=asked.layout,
        order=asked.order,
        shares=shares,
    )


def gpus_each(config: Config) -> int:
    """Return how many GPUs a rollout takes."""
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
    stalls = [_Stall(room, needs, kept if room is first else ()) for room in hosts]
    seats = _rollout_seats(needs, stalls)
    return Placement(
        hosts=tuple(room.host for room in hosts),
        seats=(trainer, *seats),
        spares=tuple(seat for stall in stalls for seat in stall.spares()),
    )


def store_hosts(placement: Placement) -> tuple[str, ...]:
    """Return the hosts with a store of policy versions: the trainer's, and those where rollouts may be."""
    used = {seat.host for seat in (*placement.seats, *placement.spares)}
    hosts = tuple(host for host in placement.hosts if host in used)
    on_gpus = any(seat.gpus for seat in placement.seats if seat.actor != "trainer")
    return hosts if len(hosts) > 1 or on_gpus else ()


class _Stall:
    """What is left of one host for rollouts."""

    def __init__(self, room: Room, needs: Needs, kept: Sequence[str]) -> None:
        self.host = room.host
        self.taken = 0
        self._needs = needs
        self._shared_out = 0
        self._all = tuple(gpu for gpu in room.gpus or () if gpu not in kept)
        self._free_gpus = self._all
        self._is_open = room.role is not HostRole.TRAINER
        self._slots = room.slots
        self.is_unknown = room.gpus is None

    @property
    def free(self) -> int:
        """How many more GPUs, or slots, it has; a large number where nobody knows."""
        if not self._is_open:
            return 0
        if self._counts_gpus:
            return len(self._free_gpus)
        return 1 << 30 if self._slots is None else max(0, self._slots - self.taken)

    @property
    def has_room(self) -> bool:
        return self.free >= max(1, self._needs.gpus_each if self._counts_gpus else 1)

    @property
    def can_share(self) -> bool:
        return self._is_open and self._needs.shares and self._needs.gpus_each == 1 and bool(self._all)

    def take(self) -> tuple[str, ...]:
        """Give the next set away."""
        self.taken += 1
        return self._next_set()

    def share(self) -> tuple[str, ...]:
        """Give a GPU that others have, too, in turn."""
        self._shared_out += 1
        return (self._all[(self._shared_out - 1) % len(self._all)],)

    def spares(self) -> list[Seat]:
        """Return a seat for each set that is free; where slots have no number, as many as are taken."""
        if self._counts_gpus:
            free = len(self._free_gpus) // self._needs.gpus_each if self._is_open else 0
        elif self._slots is None:
            free = max(1, self.taken) if self._is_open else 0
        else:
            free = self.free
        return [Seat(actor="", host=self.host, gpus=self._next_set()) for _ in range(free)]

    @property
    def _counts_gpus(self) -> bool:
        return self._needs.gpus_each > 0 and not self.is_unknown

    def _next_set(self) -> tuple[str, ...]:
        if not self._counts_gpus:
            return ()
        each = self._needs.gpus_each
        taken, self._free_gpus = self._free_gpus[:each], self._free_gpus[each:]
        return taken


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


def _rollout_seats(needs: Needs, stalls: Sequence[_Stall]) -> list[Seat]:
    """Give each rollout a set, then number them host by host, which people read more easily."""
    taken = sorted(_sets(needs, stalls), key=lambda pair: pair[0])
    return [
        Seat(actor=f"rollout/{replica}", host=stalls[index].host, gpus=gpus)
        for replica, (index, gpus) in enumerate(taken)
    ]


def _sets(needs: Needs, stalls: Sequence[_Stall]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield host and GPUs of each rollout; a heap knows whose turn it is, among a thousand hosts, too."""
    turns = [(_turn(needs, stall), index) for index, stall in enumerate(stalls) if stall.has_room]
    heapq.heapify(turns)
    sharing = [index for index, stall in enumerate(stalls) if stall.can_share]
    for replica in range(needs.replicas):
        if turns:
            index = turns[0][1]
            yield index, stalls[index].take()
            if stalls[index].has_room:
                heapq.heapreplace(turns, (_turn(needs, stalls[index]), index))
            else:
                heapq.heappop(turns)
        elif sharing:
            index = sharing[replica % len(sharing)]
            yield index, stalls[index].share()
        else:
            raise _no_room(needs, f"rollout/{replica}", stalls)


def _turn(needs: Needs, stall: _Stall) -> tuple[int, int]:
    """Return what orders hosts: their own order, or the fewest rollouts, then the most room, first."""
    if needs.order is Order.PACK:
        return (0, 0)
    return (stall.taken, 0 if stall.is_unknown else -stall.free)


def _no_room(needs: Needs, actor: str, stalls: Sequence[_Stall]) -> PlacementError:
    largest = max(stalls, key=lambda stall: stall.free)
    if needs.gpus_each:
        left = f"the largest free set is {largest.free} on {largest.host}" if largest.free else "none is free"
        fact = f"needs {_count(needs.gpus_each)} of one host; {left}"
        hint = f"lower rollout.replicas (now {needs.replicas}) or rollout.tensor_parallel, or add hosts"
        return PlacementError(actor, fact, hint)
    fact = f"needs a slot; the {len(stalls)} hosts have {sum(stall.taken for stall in stalls)}"
    return PlacementError(
        actor, fact, f"lower rollout.replicas (now {needs.replicas}), or raise slots= of a host"
    )


def _count(gpus: int) -> str:
    return f"{gpus} GPU" + ("s" if gpus != 1 else "")
