"""Where the rows of other hosts' producers arrive: written once into warm memory of the queue's host.

A parcel that is whole gets a name that says its producer owns it, exactly as if the producer had written it
here: it outlives the dock, the queue adopts it, and it is swept when its producer is gone. The name also
says where in its arena the parcel is, so that the next incarnation of a dock finds what the last one stored.

Invariants
- A name is given only to a parcel all bytes of which are there.
- A parcel sent again, whole or in part, is stored once.
"""

from collections import OrderedDict
from typing import Final

from relax_actor.faults import point
from relax_actor.ids import Holder
from relax_actor.transfer_queue.parcels import Docked, ParcelPart
from transport.pool import Piece, SegmentPool
from transport.segment import parse_name
from transport.shm import ShmSpace

REMEMBERED: Final = 4096
"""Parcels whose parts may still be on their way a second time."""

_LABEL = "parcel"


class Dock:
    """The memory side of a dock.

    Args:
        space: the run's shared memory on this host.
        holder: whose the memory is until a parcel is whole.
    """

    def __init__(self, space: ShmSpace, holder: Holder) -> None:
        self._space = space
        self._pool = SegmentPool(space, holder.name, holder.incarnation)
        self._arriving: dict[tuple[Holder, int], _Arriving] = {}
        self._docked: OrderedDict[tuple[Holder, int], Docked] = OrderedDict()
        self._known: dict[str, int] = {}
        self._gone: dict[str, int] = {}

    @property
    def arriving(self) -> int:
        """How many parcels are not whole yet."""
        return len(self._arriving)

    def take(self, holder: Holder, part: ParcelPart) -> Docked | None:
        """Store a part; return where the parcel is, once it is whole.

        What a producer sent that is gone is not taken, and has no answer.

        Raises:
            SegmentSpaceError: memory is full; nothing is changed.
        """
        if holder.incarnation <= self._gone.get(holder.name, 0):
            return None
        self._meet(holder)
        key = (holder, part.parcel)
        if (docked := self._find(key, part)) is not None:
            return docked
        arriving = self._arriving.get(key)
        if arriving is None:
            arriving = self._arriving[key] = _Arriving(self._pool.place(part.total_bytes), part.total_bytes)
        return self._name(key, arriving) if arriving.is_whole_with(part) else None

    def forget(self, name: str, incarnation: int) -> None:
        """Free what a producer that is gone has not put, and take nothing more from it."""
        self._gone[name] = max(incarnation, self._gone.get(name, 0))
        for key in [key for key in self._arriving if _is_of(key[0], name, incarnation)]:
            self._space.unlink(self._arriving.pop(key).piece.name)
        for key in [key for key in self._docked if _is_of(key[0], name, incarnation)]:
            del self._docked[key]
        self._sweep(name, incarnation)

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

    def _find(self, key: tuple[Holder, int], part: ParcelPart) -> Docked | None:
        if (docked := self._docked.get(key)) is not None or not part.is_repeated or key in self._arriving:
            return docked
        holder, parcel = key
        for segment in self._space.names(holder.name, holder.incarnation):
            label, _, offset = parse_name(segment).label.partition(".")
            if label == f"{_LABEL}{parcel}":
                return self._remember(key, Docked(segment=segment, offset=int(offset)))
        return None

    def _name(self, key: tuple[Holder, int], arriving: "_Arriving") -> Docked:
        holder, parcel = key
        piece = arriving.piece
        point("parcel_written")
        segment = self._space.rename(
            piece.name, holder.name, holder.incarnation, f"{_LABEL}{parcel}.{piece.offset}"
        )
        del self._arriving[key]
        point("parcel_docked")
        return self._remember(key, Docked(segment=segment, offset=piece.offset))

    def _remember(self, key: tuple[Holder, int], docked: Docked) -> Docked:
        self._docked[key] = docked
        if len(self._docked) > REMEMBERED:
            self._docked.popitem(last=False)
        return docked


class _Arriving:
    """A parcel some parts of which are here."""

    def __init__(self, piece: Piece, total_bytes: int) -> None:
        self.piece = piece
        self._missing_bytes = total_bytes
        self._here: set[int] = set()

    def is_whole_with(self, part: ParcelPart) -> bool:
        """Copy a part to its place, unless it is there; return whether all are."""
        if part.at not in self._here:
            start, stop = self.piece.offset + part.at, self.piece.offset + part.at + part.data.nbytes
            self.piece.segment.buf[start:stop] = part.data.data
            self._here.add(part.at)
            self._missing_bytes -= part.data.nbytes
        return self._missing_bytes == 0


def _is_of(holder: Holder, name: str, incarnation: int) -> bool:
    return holder.name == name and holder.incarnation <= incarnation
