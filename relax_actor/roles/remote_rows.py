"""An actor's way to the rows of another host, by the dock there; see `rows.Rows`."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Generic

import numpy as np
import numpy.typing as npt

from relax_actor.actor import Ref, Reply
from relax_actor.errors import RemoteError
from relax_actor.faults import point
from relax_actor.ids import Holder
from relax_actor.protocol import TensorRef
from relax_actor.roles.dock import RowDock
from relax_actor.transfer_queue.parcels import (
    PARCEL_BYTES,
    Docked,
    ParcelTooLargeError,
    RowSlice,
    assembled,
    parts_of,
    requests_for,
)
from relax_actor.transfer_queue.storage import Record, layout_of, renamed, segments_of, written_at
from transport.segment import SegmentName
from transport.shm import SegmentMissingError, SegmentSpaceError

CACHED_BYTES: Final = 64 << 20
"""Fetched rows that are kept for when they are leased again."""

CROWDED_BYTES: Final = 64 << 20
"""With more than this on its way a producer makes no further rows."""


class RemoteRows:
    """Rows in the memory of another host, by its dock.

    Args:
        dock: of that host.
        holder: who writes.
        run_id: of the run.
        cached_bytes: of fetched rows to keep.
    """

    def __init__(
        self, dock: Ref[RowDock], holder: Holder, run_id: str, cached_bytes: int = CACHED_BYTES
    ) -> None:
        self._dock, self._holder, self._run_id = dock, holder, run_id
        self._numbers = itertools.count(1)
        self._parcels: dict[str, tuple[int, npt.NDArray[np.uint8]]] = {}
        self._fetched = _Cache(cached_bytes)

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

        Raises:
            ParcelTooLargeError: it is too much for one.
        """
        if nbytes > PARCEL_BYTES:
            raise ParcelTooLargeError(nbytes)
        number = next(self._numbers)
        name = str(SegmentName(self._run_id, self._holder.name, self._holder.incarnation, f"parcel{number}"))
        data = np.zeros(nbytes, np.uint8)
        self._parcels[name] = number, data
        return name, data.data

    def hand_over(self, records: Sequence[Record], *, again: bool = False) -> "Carried[Record]":
        """Send the parcels that records refer to; see `Rows`."""
        names = dict.fromkeys(name for record in records for name in segments_of(record))
        replies = {name: self._send(name, again=again) for name in names}
        point("parcel_sent")
        return Carried(records, replies, self._landed)

    def fetch(self, refs: Sequence[TensorRef]) -> "Fetching":
        """Ask for what is not here; see `Rows`."""
        return Fetching(self._dock, refs, self._fetched)

    def read(self, ref: TensorRef) -> npt.NDArray[Any]:
        """See `Rows`."""
        return self._fetched[ref]

    def _send(self, name: str, *, again: bool) -> list[Reply[Docked | None]]:
        number, data = self._parcels[name]
        return [
            self._dock.ask(RowDock.take, self._holder, part)
            for part in parts_of(number, data, is_repeated=again)
        ]

    def _landed(self, name: str) -> None:
        del self._parcels[name]


class Carried(Generic[Record]):
    """Parcels on their way to a dock.

    Args:
        sent: the records that refer to them.
        replies: of each parcel, by the name it was written under, the answers to its parts.
        landed: told of each parcel that is there.
    """

    def __init__(
        self,
        sent: Sequence[Record],
        replies: Mapping[str, Sequence[Reply[Docked | None]]],
        landed: Callable[[str], None],
    ) -> None:
        self.sent, self._replies, self._on_landed = sent, replies, landed

    def done(self) -> bool:
        """See `HandOver`."""
        return self.missing() is None

    def missing(self) -> Reply[Docked | None] | None:
        """Return an answer that is not there yet, if any."""
        replies = (reply for replies in self._replies.values() for reply in replies)
        return next((reply for reply in replies if not reply.done()), None)

    def failure(self) -> str:
        """See `HandOver`.

        Raises:
            RemoteError: the dock refuses, for another reason than a full memory.
        """
        errors = [reply.exception() for replies in self._replies.values() for reply in replies]
        for error in filter(None, errors):
            if isinstance(error, RemoteError) and error.type_name != SegmentSpaceError.__name__:
                raise error
        failed = next(filter(None, errors), None)
        if failed is not None:
            return str(failed)
        return "" if all(map(_docked, self._replies.values())) else "the dock was replaced in between"

    def records(self) -> list[Record]:
        """See `HandOver`."""
        moved = list(self.sent)
        for name, replies in self._replies.items():
            docked = _docked(replies)
            assert docked is not None  # noqa: S101 - `failure` was asked first
            moved = [renamed(record, name, docked.segment, docked.offset) for record in moved]
            self._on_landed(name)
        return moved


class Fetching:
    """Rows on their way from a dock; what it does not answer is asked for again.

    Args:
        dock: who has them.
        refs: the arrays.
        fetched: where they are, or go.
    """

    def __init__(self, dock: Ref[RowDock], refs: Sequence[TensorRef], fetched: "_Cache") -> None:
        self._dock, self._fetched = dock, fetched
        self._refs = list(dict.fromkeys(refs))
        self._wanted = [ref for ref in self._refs if ref not in fetched]
        self._asked = [self._ask(request) for request in requests_for(self._wanted)]

    def done(self) -> bool:
        """See `Arrival`.

        Raises:
            RemoteError: the dock refuses, such as a reference that is wrong.
        """
        if self.missing() is not None:
            return False
        lost = [request for request, reply in self._asked if _is_lost(reply)]
        if lost:
            self._asked = [each for each in self._asked if not _is_lost(each[1])]
            self._asked += [self._ask(request) for request in lost]
            return False
        self._keep()
        return True

    def missing(self) -> Reply[list[Any]] | None:
        """Return an answer that is not there yet, if any."""
        return next((reply for _, reply in self._asked if not reply.done()), None)

    def _ask(self, request: list[RowSlice]) -> tuple[list[RowSlice], Reply[list[Any]]]:
        return request, self._dock.ask(RowDock.give, request)

    def _keep(self) -> None:
        pieces: dict[TensorRef, list[tuple[int, Any]]] = {ref: [] for ref in self._wanted}
        for request, reply in self._asked:
            for piece, data in zip(request, reply.result(), strict=True):
                pieces[piece.ref].append((piece.start, data))
        whole = {ref: each for ref, each in pieces.items() if all(data is not None for _, data in each)}
        self._fetched.add({ref: assembled(ref, each) for ref, each in whole.items()}, self._refs)
        self._asked, self._wanted = [], []


class _Cache:
    """Arrays by their references: a name means the same bytes for ever.

    Args:
        most_bytes: of arrays to keep, beside those that are about to be read.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._arrays: OrderedDict[TensorRef, npt.NDArray[Any]] = OrderedDict()

    def __contains__(self, ref: TensorRef) -> bool:
        return ref in self._arrays

    def __getitem__(self, ref: TensorRef) -> npt.NDArray[Any]:
        if ref not in self._arrays:
            raise SegmentMissingError(ref.segment)
        self._arrays.move_to_end(ref)
        return self._arrays[ref]

    def add(self, arrays: Mapping[TensorRef, npt.NDArray[Any]], needed: Collection[TensorRef]) -> None:
        """Keep these and whatever is needed now, and as much of the rest as there is room for."""
        self._arrays.update(arrays)
        nbytes, kept = sum(array.nbytes for array in self._arrays.values()), {*needed}
        for ref in [ref for ref in self._arrays if ref not in kept]:
            if nbytes <= self._most_bytes:
                return
            nbytes -= self._arrays.pop(ref).nbytes


def _docked(replies: Sequence[Reply[Docked | None]]) -> Docked | None:
    return next((found for reply in replies if (found := reply.result()) is not None), None)


def _is_lost(reply: Reply[Any]) -> bool:
    """Whether a request has to be repeated: the dock was away."""
    error = reply.exception()
    if isinstance(error, RemoteError):
        raise error
    return error is not None
