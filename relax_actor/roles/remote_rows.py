"""An actor's way to the rows of another host, by the dock there; see `rows.Rows`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic

import numpy as np
import numpy.typing as npt

from relax_actor.actor import Ref
from relax_actor.errors import RemoteError
from relax_actor.ids import Holder
from relax_actor.protocol import TensorRef
from relax_actor.roles.dock import RowDock
from relax_actor.roles.kept_rows import RowCache, RowMemory
from relax_actor.transfer_queue.carrying import BROKEN, STALL_S, Carrier
from relax_actor.transfer_queue.dock import Berth
from relax_actor.transfer_queue.parcels import (
    PARCEL_BYTES,
    ParcelTooLargeError,
    RowSlice,
    array_bytes,
    requests_for,
)
from relax_actor.transfer_queue.storage import Record, layout_of, renamed, segments_of, written_at
from transport.address import Address
from transport.segment import SegmentName
from transport.shm import SegmentSpaceError
from transport.stream import Stream

CACHED_BYTES: Final = 64 << 20
"""Fetched rows that are kept for when they are leased again."""

CROWDED_BYTES: Final = 64 << 20
"""With more than this on its way a producer makes no further rows."""

KEPT_BYTES: Final = CROWDED_BYTES
"""Memory of parcels that are there already, kept for the next ones."""

_numbers = itertools.count(1)  # of parcels and links: no two of one incarnation are alike


class RemoteRows:
    """Rows in the memory of another host, by its dock.

    Args:
        dock: of that host.
        holder: who writes.
        run_id: of the run.
        cached_bytes: of fetched rows to keep.
        wake: called in another thread when something has arrived, here or there.
    """

    def __init__(
        self,
        dock: Ref[RowDock],
        holder: Holder,
        run_id: str,
        cached_bytes: int = CACHED_BYTES,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._holder, self._run_id = holder, run_id
        self._carrier = Carrier("the dock", _dialled(dock, holder), wake)
        self._parcels: dict[str, tuple[int, npt.NDArray[np.uint8]]] = {}
        self._memory = RowMemory(KEPT_BYTES)
        self._fetched = RowCache(cached_bytes)

    @property
    def is_crowded(self) -> bool:
        """See `Rows`."""
        return sum(data.nbytes for _, data in self._parcels.values()) > CROWDED_BYTES

    def write(self, rows: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[dict[str, TensorRef]]:
        """Lay rows out as they will lie in the other host's memory; see `Rows`.

        Raises:
            ParcelTooLargeError: they are too much for one put.
            ValueError: an array that is not of numbers.
        """
        if not rows:
            return []
        layout, nbytes = layout_of(rows)
        name, room = self.room(max(1, nbytes))
        return [
            {key: written_at(room, name, offsets[key], array) for key, array in row.items()}
            for row, offsets in zip(rows, layout, strict=True)
        ]

    def room(self, nbytes: int) -> tuple[str, memoryview]:
        """Return the name and the memory of a new parcel, to be written and then handed over.

        The memory is another parcel's as soon as it is known that this one is there.

        Raises:
            ParcelTooLargeError: it is too much for one.
        """
        if nbytes > PARCEL_BYTES:
            raise ParcelTooLargeError(nbytes)
        number = next(_numbers)
        name = str(SegmentName(self._run_id, self._holder.name, self._holder.incarnation, f"parcel{number}"))
        data = self._memory.take(nbytes)
        self._parcels[name] = number, data
        return name, data.data

    def hand_over(self, records: Sequence[Record], *, again: bool = False) -> "Carried[Record]":
        """Send the parcels that records refer to; see `Rows`."""
        names = dict.fromkeys(name for record in records for name in segments_of(record))
        berths = {name: self._send(name, again=again) for name in names}
        return Carried(records, berths, self._landed)

    def fetch(self, refs: Sequence[TensorRef]) -> "Fetching":
        """Ask for what is not here; see `Rows`."""
        return Fetching(self._carrier, refs, self._fetched)

    def read(self, ref: TensorRef) -> npt.NDArray[Any]:
        """See `Rows`."""
        return self._fetched[ref]

    def close(self) -> None:
        """End the link to the dock; what is on its way fails."""
        self._carrier.close()

    def _send(self, name: str, *, again: bool) -> "Future[Berth]":
        number, data = self._parcels[name]
        return self._carrier.send(number, data.data, is_repeated=again)

    def _landed(self, name: str) -> None:
        self._memory.give_back(self._parcels.pop(name)[1])


class Carried(Generic[Record]):
    """Parcels on their way to a dock.

    Args:
        sent: the records that refer to them.
        berths: of each parcel, by the name it was written under, where it will lie.
        landed: told of each parcel that is there.
    """

    def __init__(
        self,
        sent: Sequence[Record],
        berths: Mapping[str, "Future[Berth]"],
        landed: Callable[[str], None],
    ) -> None:
        self.sent, self._berths, self._on_landed = sent, berths, landed

    def done(self) -> bool:
        """See `HandOver`."""
        return self.missing() is None

    def missing(self) -> "Future[Berth] | None":
        """Return an answer that is not there yet, if any."""
        return next((berth for berth in self._berths.values() if not berth.done()), None)

    def failure(self) -> str:
        """See `HandOver`.

        Raises:
            RemoteError: the dock refuses, for another reason than a full memory.
        """
        errors = [error for berth in self._berths.values() if (error := berth.exception()) is not None]
        for error in errors:
            if not is_worth_another_try(error):
                raise error
        return str(errors[0]) if errors else ""

    def records(self) -> list[Record]:
        """See `HandOver`."""
        moved = list(self.sent)
        for name, berth in self._berths.items():
            segment, offset = berth.result()
            moved = [renamed(record, name, segment, offset) for record in moved]
            self._on_landed(name)
        return moved


class Fetching:
    """Rows on their way from a dock; what is lost on its way is asked for again.

    Args:
        carrier: by whom they come.
        refs: the arrays.
        fetched: where they are, or go.
    """

    def __init__(self, carrier: Carrier, refs: Sequence[TensorRef], fetched: RowCache) -> None:
        self._carrier, self._fetched = carrier, fetched
        self._refs = list(dict.fromkeys(refs))
        self._targets = {
            ref: np.empty(array_bytes(ref), np.uint8) for ref in self._refs if ref not in fetched
        }
        self._asked = [self._ask(request) for request in requests_for(self._targets)]

    def done(self) -> bool:
        """See `Arrival`.

        Raises:
            RemoteError: the dock refuses, such as a reference that is wrong.
        """
        if self.missing() is not None:
            return False
        if lost := [request for request, reply in self._asked if _is_lost(reply)]:
            self._asked = [each for each in self._asked if not _is_lost(each[1])]
            self._asked += [self._ask(request) for request in lost]
            return False
        self._keep()
        return True

    def missing(self) -> "Future[list[bool]] | None":
        """Return an answer that is not there yet, if any."""
        return next((reply for _, reply in self._asked if not reply.done()), None)

    def _ask(self, request: list[RowSlice]) -> "tuple[list[RowSlice], Future[list[bool]]]":
        targets = [self._targets[piece.ref][piece.start : piece.stop].data for piece in request]
        return request, self._carrier.want(request, targets)

    def _keep(self) -> None:
        freed = {
            piece.ref
            for request, reply in self._asked
            for piece, is_there in zip(request, reply.result(), strict=True)
            if not is_there
        }
        whole = {ref: _shaped(ref, flat) for ref, flat in self._targets.items() if ref not in freed}
        self._fetched.add(whole, self._refs)
        self._asked, self._targets = [], {}


def is_worth_another_try(error: BaseException) -> bool:
    """Whether what failed may succeed the next time: the link broke, or memory was full."""
    return isinstance(error, SegmentSpaceError) or (
        isinstance(error, BROKEN) and not isinstance(error, RemoteError)
    )


def _dialled(dock: Ref[RowDock], holder: Holder) -> Callable[[], Stream]:
    way = next(_numbers)

    def dial() -> Stream:
        admission = dock.ask(RowDock.admit, holder, way).result()
        return Stream.connect(Address.parse(admission.address), admission.ticket, STALL_S)

    return dial


def _is_lost(reply: "Future[Any]") -> bool:
    """Whether a request has to be repeated: the link broke."""
    error = reply.exception()
    if error is not None and not is_worth_another_try(error):
        raise error
    return error is not None


def _shaped(ref: TensorRef, flat: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    array = flat.view(ref.dtype).reshape(ref.shape)
    array.flags.writeable = False
    return array
