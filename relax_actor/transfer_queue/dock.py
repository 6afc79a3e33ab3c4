"""Where the rows of other hosts' producers arrive: written once into warm memory of the queue's host.

A parcel that is whole gets a name that says its producer owns it, exactly as if the producer had written it
here: it outlives the dock, the queue adopts it, and it is swept when its producer is gone. The name also
says where in its arena the parcel is, so that the next incarnation of a dock finds what the last one stored.

Invariants
- A name is given only to a parcel all bytes of which are there.
- A parcel sent again, also while it still comes by another link, is stored once.
- Room belongs to who writes into it until it is named or given up, also when its producer is gone: nothing
  else is ever written there meanwhile.
"""

import threading
from collections import OrderedDict
from typing import Final, NamedTuple

from relax_actor.faults import point
from relax_actor.ids import Holder
from transport.pool import Piece, SegmentPool
from transport.segment import parse_name
from transport.shm import ShmSpace

REMEMBERED: Final = 4096
"""Parcels that may come a second time and are found without a look at the names."""

_LABEL = "parcel"


class Berth(NamedTuple):
    """Where a parcel lies: from `offset` of `segment` on."""

    segment: str
    offset: int


class Dock:
    """The memory side of a dock; any thread.

    Args:
        space: the run's shared memory on this host.
        holder: whose the memory is until a parcel is whole.
    """

    def __init__(self, space: ShmSpace, holder: Holder) -> None:
        self._space = space
        self._lock = threading.Lock()
        self._pool = SegmentPool(space, holder.name, holder.incarnation)
        self._arriving: set[str] = set()
        self._docked: OrderedDict[tuple[Holder, int], Berth] = OrderedDict()
        self._known: dict[str, int] = {}
        self._gone: dict[str, int] = {}

    @property
    def arriving(self) -> int:
        """How many parcels are not whole yet."""
        return len(self._arriving)

    def is_gone(self, holder: Holder) -> bool:
        """Whether a producer is taken for dead."""
        return holder.incarnation <= self._gone.get(holder.name, 0)

    def room(self, holder: Holder, parcel: int, nbytes: int, *, is_repeated: bool) -> Piece | Berth:
        """Return room for a parcel, to be filled and then named or given up; or where it is already.

        Args:
            holder: who sends it.
            parcel: its number.
            nbytes: its size.
            is_repeated: whether it was sent before.

        Raises:
            SegmentSpaceError: memory is full; nothing is changed.
        """
        with self._lock:
            self._meet(holder)
            if (found := self._find((holder, parcel), is_repeated=is_repeated)) is not None:
                return found
            piece = self._pool.place(nbytes)
            self._arriving.add(piece.name)
            return piece

    def name(self, holder: Holder, parcel: int, piece: Piece) -> Berth | None:
        """Give a parcel that is whole to its producer; None for one that is gone, whose parcel is freed."""
        with self._lock:
            found = self._docked.get((holder, parcel))
            if found is not None or self.is_gone(holder):
                self._free(piece)
                return found
            point("parcel_written")
            segment = self._space.rename(
                piece.name, holder.name, holder.incarnation, f"{_LABEL}{parcel}.{piece.offset}"
            )
            self._arriving.discard(piece.name)
            point("parcel_docked")
            return self._remember((holder, parcel), Berth(segment, piece.offset))

    def give_up(self, piece: Piece) -> None:
        """Free room that will not be filled; who wrote into it has stopped."""
        with self._lock:
            self._free(piece)

    def forget(self, name: str, incarnation: int) -> None:
        """Free what a producer that is gone has not put, and name nothing more for it."""
        with self._lock:
            self._gone[name] = max(incarnation, self._gone.get(name, 0))
            for key in [key for key in self._docked if _is_of(key[0], name, incarnation)]:
                del self._docked[key]
            self._sweep(name, incarnation)

    def _free(self, piece: Piece) -> None:
        self._arriving.discard(piece.name)
        self._space.unlink(piece.name)

    def _meet(self, holder: Holder) -> None:
        """Free what earlier incarnations left while no dock heard of their end; once for each."""
        if self._known.get(holder.name, 0) < holder.incarnation:
            self._known[holder.name] = holder.incarnation
            self._sweep(holder.name, holder.incarnation - 1)

    def _sweep(self, name: str, incarnation: int) -> None:
        for segment in self._space.names(name):
            found = parse_name(segment)
            if found.incarnation <= incarnation and found.label.startswith(_LABEL):
                self._space.unlink(segment)

    def _find(self, key: tuple[Holder, int], *, is_repeated: bool) -> Berth | None:
        if (docked := self._docked.get(key)) is not None or not is_repeated:
            return docked
        holder, parcel = key
        for segment in self._space.names(holder.name, holder.incarnation):
            label, _, offset = parse_name(segment).label.partition(".")
            if label == f"{_LABEL}{parcel}":
                return self._remember(key, Berth(segment, int(offset)))
        return None

    def _remember(self, key: tuple[Holder, int], berth: Berth) -> Berth:
        self._docked[key] = berth
        if len(self._docked) > REMEMBERED:
            self._docked.popitem(last=False)
        return berth


def _is_of(holder: Holder, name: str, incarnation: int) -> bool:
    return holder.name == name and holder.incarnation <= incarnation
