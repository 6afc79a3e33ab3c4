"""Bytes of a row link, summed up while the processor's cache still has them."""

from collections.abc import Iterable
from typing import Final

import xxhash

from relax_actor.transfer_queue.parcels import RowsDamagedError, spans
from transport.stream import Stream

PIECE_BYTES: Final = 256 << 10
"""What is received before it is summed up: it is still in the core's own cache then."""


def summed(views: Iterable[memoryview]) -> int:
    """Return the XXH3 of views of bytes, one after the other."""
    total = xxhash.xxh3_64()
    for view in views:
        total.update(view)
    return total.intdigest()


def receive(stream: Stream, target: memoryview, xxh3: int) -> None:
    """Receive bytes to where they belong.

    Raises:
        RowsDamagedError: they are not those that were summed up when they were sent.
        StreamError: the stream ended or stood still.
    """
    total = xxhash.xxh3_64()
    for span in spans(len(target), PIECE_BYTES):
        piece = target[span.start : span.stop]
        stream.receive_into(piece)
        total.update(piece)
    if total.intdigest() != xxh3:
        raise RowsDamagedError(stream.peer, f"damaged {len(target)} bytes")


def throw_away(stream: Stream, nbytes: int) -> None:
    """Receive bytes that nobody needs.

    Raises:
        StreamError: the stream ended or stood still.
    """
    scratch = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    for span in spans(nbytes, PIECE_BYTES):
        stream.receive_into(scratch[: span.stop - span.start])
