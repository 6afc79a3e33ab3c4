"""What a row link carries for its peer: a parcel to be sent, or rows that are wanted.

A job says what is to be sent for it, and takes the dock's answer, straight to where it belongs.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from relax_actor.faults import point
from relax_actor.transfer_queue.dock import Berth
from relax_actor.transfer_queue.parcels import (
    FREED,
    Docked,
    Down,
    Given,
    Part,
    RowLinkError,
    RowSlice,
    Want,
    encode,
    spans,
)
from relax_actor.transfer_queue.summing import receive, summed
from transport.stream import Stream


class Job(Protocol):
    """Something to be sent, and answered."""

    future: Future[Any]

    def frames(self, number: int) -> Iterator[tuple[bytes, Sequence[memoryview]]]:
        """Return records and their payloads."""
        ...

    def take(self, stream: Stream, said: Down, nbytes: int) -> Any:
        """Return the result, of an answer and the payload that follows.

        Raises:
            RowLinkError: it is no answer to this.
        """
        ...


class ParcelJob:
    """A parcel on its way to the dock; see `Carrier.send`."""

    def __init__(self, parcel: int, data: memoryview, *, is_repeated: bool) -> None:
        self.future: Future[Berth] = Future()
        self._parcel, self._data, self._is_repeated = parcel, data, is_repeated

    def frames(self, number: int) -> Iterator[tuple[bytes, Sequence[memoryview]]]:
        """Cut the parcel into parts."""
        for span in spans(len(self._data)):
            payload = [self._data[span.start : span.stop]]
            part = Part(
                number=number,
                parcel=self._parcel,
                at=span.start,
                total_bytes=len(self._data),
                xxh3=summed(payload),
                is_repeated=self._is_repeated,
            )
            yield encode(part), payload
        point("parcel_sent")

    def take(self, stream: Stream, said: Down, nbytes: int) -> Berth:
        """Return where it lies."""
        if not isinstance(said, Docked) or nbytes:
            raise RowLinkError(stream.peer, f"answered a parcel by {said!r} and {nbytes} bytes")
        return Berth(said.segment, said.offset)


class WantJob:
    """Rows that are asked for; see `Carrier.want`."""

    def __init__(self, slices: Sequence[RowSlice], targets: Sequence[memoryview]) -> None:
        self.future: Future[list[bool]] = Future()
        self._slices, self._targets = slices, targets

    def frames(self, number: int) -> Iterator[tuple[bytes, Sequence[memoryview]]]:
        """Ask."""
        yield encode(Want(number=number, slices=tuple(self._slices))), ()

    def take(self, stream: Stream, said: Down, nbytes: int) -> list[bool]:
        """Receive what is there to where it belongs."""
        if not isinstance(said, Given) or not self._is_answered_by(said, nbytes):
            raise RowLinkError(
                stream.peer, f"answered {len(self._slices)} wants by {said!r} and {nbytes} bytes"
            )
        is_there = [size != FREED for size in said.sizes]
        present = [target for target, here in zip(self._targets, is_there, strict=True) if here]
        if len(present) == 1:
            receive(stream, present[0], said.xxh3)
        else:  # small ones, which cost less to copy than to receive one by one
            _receive_together(stream, present, said.xxh3)
        return is_there

    def _is_answered_by(self, given: Given, nbytes: int) -> bool:
        wanted = [len(target) for target in self._targets]
        return (
            len(given.sizes) == len(wanted)
            and all(size in {FREED, want} for size, want in zip(given.sizes, wanted, strict=True))
            and nbytes == sum(size for size in given.sizes if size != FREED)
        )


def _receive_together(stream: Stream, targets: Sequence[memoryview], xxh3: int) -> None:
    scratch = memoryview(bytearray(sum(map(len, targets))))
    receive(stream, scratch, xxh3)
    start = 0
    for target in targets:
        target[:] = scratch[start : start + len(target)]
        start += len(target)
