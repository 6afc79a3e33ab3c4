"""How bytes get through a ring of slots: who fills which when (pure), and the words both sides watch.

A filler and a reader share a page of memory. The filler says how many chunks lie ready, the reader how many
it has done with; chunk k is in slot k modulo the number of slots. While the reader copies one slot out, the
next is being filled. Nobody waits in the kernel: either side may be killed or stopped at any moment, so each
looks at the words and, from time to time, at whether the other is alive.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from transport.shm import Segment

PAGE_BYTES = 16 << 10
_FILLED, _DONE_WITH, _FAILURE_BYTES = range(3)  # the words
_TEXT_AT = 64


class Chunk(NamedTuple):
    """A piece of a bucket that fits into a slot."""

    bucket: int
    start: int  # bytes from the start of the bucket
    nbytes: int


def chunks(bucket_bytes: Iterable[int], slot_bytes: int) -> Iterator[Chunk]:
    """Cut buckets into chunks; one that fits into a slot stays whole."""
    for bucket, nbytes in enumerate(bucket_bytes):
        for start in range(0, nbytes, slot_bytes):
            yield Chunk(bucket, start, min(slot_bytes, nbytes - start))


class Move(StrEnum):
    """What a filler does next."""

    LAUNCH = "launch"  # start to copy the next chunk into its slot
    ANNOUNCE = "announce"  # say that the oldest launched chunk lies ready, once it does
    WAIT = "wait"  # all slots are full
    END = "end"  # the reader has done with everything


class Ring:
    """The filler's bookkeeping.

    Args:
        chunks: how many there are.
        slots: how many lie ready at once, at most.
    """

    def __init__(self, chunks: int, slots: int) -> None:
        self._chunks, self._slots = chunks, slots
        self.launched = self.filled = 0

    def move(self, done_with: int) -> Move:
        """Return what to do now that the reader has done with so many chunks."""
        if done_with >= self._chunks:
            return Move.END
        if self.launched < self._chunks and self.launched - done_with < self._slots:
            return Move.LAUNCH
        return Move.ANNOUNCE if self.filled < self.launched else Move.WAIT


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the filler stopped; with `bucket`, that bucket is not what was published."""

    reason: str
    bucket: int | None = None
    expected: str = ""
    found: str = ""


class Page:
    """The words of one transfer.

    Args:
        segment: at least `PAGE_BYTES`, zeros at first; mapped for writing by both sides.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._words = segment.buf[:_TEXT_AT].cast("Q")  # one aligned 64-bit load or store an access
        self._text = segment.buf[_TEXT_AT:PAGE_BYTES]

    @property
    def filled(self) -> int:
        """How many chunks lie ready, those done with included; the filler's word."""
        return self._words[_FILLED]

    @filled.setter
    def filled(self, count: int) -> None:
        self._words[_FILLED] = count

    @property
    def done_with(self) -> int:
        """How many chunks the reader does not need any more; the reader's word."""
        return self._words[_DONE_WITH]

    @done_with.setter
    def done_with(self, count: int) -> None:
        self._words[_DONE_WITH] = count

    def fail(self, failure: Failure) -> None:
        """Say why no further chunk will come."""
        text = msgspec.msgpack.encode(failure)
        if len(text) > len(self._text):
            text = msgspec.msgpack.encode(msgspec.structs.replace(failure, reason=failure.reason[:1000]))
        self._text[: len(text)] = text
        self._words[_FAILURE_BYTES] = len(text)  # last: it makes the text visible

    def failure(self) -> Failure | None:
        """Return why no further chunk will come, None where nothing is wrong."""
        length = self._words[_FAILURE_BYTES]
        return msgspec.msgpack.decode(self._text[:length], type=Failure) if length else None

    def close(self) -> None:
        """Unmap it, and so give back a lease on it."""
        self._words.release()
        self._text.release()
        self._segment.close()
