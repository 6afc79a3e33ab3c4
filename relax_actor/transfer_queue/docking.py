"""The dock's end of a row link: takes the parcels of one peer, and gives it what it asks for.

One thread a link. What arrives goes straight into the memory it will be read from, and what is given comes
straight from where it lies. A link that breaks takes with it only what was not whole.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.actor.failure import describe
from relax_actor.faults import point
from relax_actor.ids import Holder
from relax_actor.protocol import TensorRef
from relax_actor.transfer_queue.dock import Berth, Dock
from relax_actor.transfer_queue.parcels import (
    FREED,
    Docked,
    Given,
    Part,
    Refused,
    RowLinkError,
    RowSlice,
    Want,
    encode,
    read_up,
)
from relax_actor.transfer_queue.storage import LOOK_S, PATIENCE_S, RowReader
from relax_actor.transfer_queue.summing import receive, summed, throw_away
from transport.pool import Piece
from transport.shm import SegmentMissingError, SegmentSpaceError
from transport.stream import Stream


class Traffic:
    """What went through the links of a dock; any thread."""

    def __init__(self) -> None:
        self.parts = self.taken_bytes = self.slices = self.given_bytes = 0
        self._lock = threading.Lock()

    def took(self, nbytes: int) -> None:
        """Count a part."""
        with self._lock:
            self.parts += 1
            self.taken_bytes += nbytes

    def gave(self, slices: int, nbytes: int) -> None:
        """Count an answer that is about to be sent."""
        with self._lock:
            self.slices += slices
            self.given_bytes += nbytes
            point("rows_given")


class SharedReader:
    """Reads rows for several threads.

    Args:
        reader: of this host's rows.
    """

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()

    def bytes_of(self, piece: RowSlice) -> memoryview | None:
        """Return a view of bytes of an array; None where the row was freed.

        Raises:
            RowRefError: the reference is wrong.
        """
        try:
            array = self._read(piece.ref)
        except SegmentMissingError:
            return None
        return array.reshape(-1).view(np.uint8)[piece.start : piece.stop].data

    def _read(self, ref: TensorRef) -> npt.NDArray[Any]:
        with self._lock:
            return self._reader.read(ref)


class DockLink:
    """One peer's link.

    Args:
        dock: where parcels go.
        rows: where wanted rows are.
        traffic: what is counted.
        peer: who sends and asks.
        on_full: told once for each parcel that has to wait for memory.
    """

    def __init__(
        self,
        dock: Dock,
        rows: SharedReader,
        traffic: Traffic,
        peer: Holder,
        on_full: Callable[[SegmentSpaceError], None],
    ) -> None:
        self.peer, self.is_closed = peer, False
        self._dock, self._rows, self._traffic, self._on_full = dock, rows, traffic, on_full
        self._arriving: _Arriving | None = None
        self._stream: Stream | None = None

    @property
    def is_open(self) -> bool:
        """Whether the peer is connected."""
        return self._stream is not None and not self.is_closed

    def run(self, stream: Stream) -> None:
        """Serve until the link ends.

        Raises:
            StreamError: the stream ended, or stood still in the middle of something.
            RowLinkError: the peer says what nobody says, or its bytes were damaged.
        """
        self._stream = stream
        try:
            while not self.is_closed:
                stream.is_spoken_to(None)
                self._hear(stream)
        finally:
            self._stream = None
            self._drop()

    def close(self) -> None:
        """End the link; any thread."""
        self.is_closed = True
        if (stream := self._stream) is not None:
            stream.end()

    def _hear(self, stream: Stream) -> None:
        record, nbytes = stream.receive()
        said = read_up(record, str(self.peer))
        if isinstance(said, Part):
            self._take(stream, said, nbytes)
        elif nbytes:
            raise RowLinkError(str(self.peer), f"sent {nbytes} bytes that belong to nothing")
        else:
            self._give(stream, said)

    # -- parcels --------------------------------------------------------------------------------

    def _take(self, stream: Stream, part: Part, nbytes: int) -> None:
        if part.at == 0:
            self._drop()
            self._arriving = self._begun(part)
        arriving = self._arriving
        if arriving is None or not arriving.awaits(part, nbytes):
            raise RowLinkError(
                str(self.peer), f"sent {nbytes} bytes of parcel {part.parcel} from {part.at}, out of turn"
            )
        if arriving.piece is None:
            throw_away(stream, nbytes)
        else:
            receive(stream, arriving.target(nbytes), part.xxh3)
        arriving.here_bytes += nbytes
        self._traffic.took(nbytes)
        if arriving.here_bytes == part.total_bytes:
            self._arriving = None
            stream.send(encode(self._landed(arriving, part)))
        else:
            point("part_taken")

    def _begun(self, part: Part) -> "_Arriving":
        try:
            found = self._room(part)
        except Exception as error:  # noqa: BLE001 - it is the peer's to know
            return _Arriving(part, answer=_refused(part.number, error))
        if isinstance(found, Piece):
            return _Arriving(part, piece=found)
        return _Arriving(part, answer=_docked(part.number, found))

    def _room(self, part: Part) -> Piece | Berth:
        """Return room, waiting for it where memory is full, or where the parcel is."""
        deadline, is_told = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return self._dock.room(self.peer, part.parcel, part.total_bytes, is_repeated=part.is_repeated)
            except SegmentSpaceError as error:
                if time.monotonic() >= deadline or self.is_closed:
                    raise
                if not is_told:
                    self._on_full(error)
                is_told = True
            time.sleep(LOOK_S)

    def _landed(self, arriving: "_Arriving", part: Part) -> Docked | Refused:
        if arriving.piece is None:
            return arriving.answer
        try:
            berth = self._dock.name(self.peer, part.parcel, arriving.piece)
        except Exception as error:  # noqa: BLE001 - it is the peer's to know
            self._dock.give_up(arriving.piece)
            return _refused(part.number, error)
        if berth is None:
            raise RowLinkError(str(self.peer), "belongs to an incarnation that is taken for dead")
        return _docked(part.number, berth)

    def _drop(self) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving.piece is not None:
            self._dock.give_up(arriving.piece)

    # -- what is wanted -------------------------------------------------------------------------

    def _give(self, stream: Stream, want: Want) -> None:
        try:
            found = [self._rows.bytes_of(each) for each in want.slices]
        except Exception as error:  # noqa: BLE001 - it is the peer's to know
            stream.send(encode(_refused(want.number, error)))
            return
        views = [view for view in found if view is not None]
        self._traffic.gave(len(found), sum(view.nbytes for view in views))
        sizes = tuple(FREED if view is None else view.nbytes for view in found)
        stream.send(encode(Given(number=want.number, sizes=sizes, xxh3=summed(views))), *views)


class _Arriving:
    """A parcel that is not whole yet.

    Args:
        part: its first.
        piece: where it goes; None throws it away.
        answer: what its sender is told where it is thrown away.
    """

    def __init__(
        self, part: Part, *, piece: Piece | None = None, answer: Docked | Refused | None = None
    ) -> None:
        self.piece, self.here_bytes = piece, 0
        self._parcel, self._total_bytes, self._answer = part.parcel, part.total_bytes, answer

    @property
    def answer(self) -> Docked | Refused:
        """What its sender is told."""
        assert self._answer is not None  # noqa: S101 - there is one, or a piece
        return self._answer

    def awaits(self, part: Part, nbytes: int) -> bool:
        """Whether this is the part that comes next."""
        is_next = (part.parcel, part.at, part.total_bytes) == (
            self._parcel,
            self.here_bytes,
            self._total_bytes,
        )
        return is_next and 0 < nbytes <= self._total_bytes - self.here_bytes

    def target(self, nbytes: int) -> memoryview:
        """Return where the next bytes go."""
        assert self.piece is not None  # noqa: S101 - who asks has looked
        start = self.piece.offset + self.here_bytes
        return self.piece.segment.buf[start : start + nbytes]


def _docked(number: int, berth: Berth) -> Docked:
    return Docked(number=number, segment=berth.segment, offset=berth.offset)


def _refused(number: int, error: Exception) -> Refused:
    return Refused(number=number, failed=describe(number, error))
