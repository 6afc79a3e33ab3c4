"""What hosts have for actors, what a run wants of them, and what is left of each meanwhile. Pure."""

from collections.abc import Sequence

import msgspec

from launcher.hosts import HostRole
from launcher.options import Layout, Order
from relax_actor.placement import Seat


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a host has for actors."""

    host: str  # as placements name it
    role: HostRole | None = None
    gpus: tuple[str, ...] | None = None  # None: not known, the host is asked when a run starts
    slots: int | None = None  # rollouts it takes where they need no GPU; None: any number


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a run wants to place."""

    replicas: int
    gpus_each: int = 0  # of one rollout on each of its hosts; 0: none
    trainer_gpus: int = 0
    layout: Layout = Layout.SEPARATE
    order: Order = Order.SPREAD
    shares: bool = (
        False  # rollouts take GPUs in turn where there are too few, and the trainer's if it has the only one
    )
    hosts_each: int = 1  # over which one rollout is spread


class Stall:
    """What is left of one host for rollouts.

    Args:
        room: what it has.
        needs: of the run.
        kept: GPUs that are somebody else's.
    """

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
        """Whether a rollout, or its share on this host, fits."""
        return self.free >= max(1, self._needs.gpus_each if self._counts_gpus else 1)

    @property
    def can_share(self) -> bool:
        """Whether rollouts may have its GPUs in turn."""
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
