"""Rows on their way between hosts: what is said of them, and how they are cut. Pure.

A *parcel* is all arrays of one put, side by side as they will lie in memory. It travels in parts, so that
what is asked for in between need not wait for all of it. Both ends keep one stream; up is towards the dock,
and every answer bears the number of what it answers. Records grow at the end only.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from relax_actor.actor.wire import Failed
from relax_actor.errors import RelaxError
from relax_actor.protocol import TensorRef

R = TypeVar("R")

PART_BYTES: Final = 1 << 20
"""What is summed up and sent at once: it is still in the processor's cache then."""

PARCEL_BYTES: Final = 8 << 30
"""A put that is larger is refused."""

FREED: Final = -1


class ParcelTooLargeError(RelaxError):
    """Rows of one put that are more than one parcel may hold."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        super().__init__(
            f"rows of {nbytes} bytes cannot be put from another host: a parcel holds {PARCEL_BYTES}"
            "\n\nhint: put fewer rows at once, or run their producer on the queue's host"
        )


class RowLinkError(RelaxError):
    """A link between a dock and one of its peers is of no use any more.

    Args:
        peer: who is at the other end.
        fact: what happened.
    """

    def __init__(self, peer: str, fact: str) -> None:
        self.peer, self.fact = peer, fact
        super().__init__(f"the row link with {peer} {fact}")


class RowsDamagedError(RowLinkError):
    """Bytes that arrived are not those that were sent."""


class RowSlice(msgspec.Struct, frozen=True, kw_only=True):
    """These bytes of an array."""

    ref: TensorRef
    start: int
    stop: int


class Part(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """Up: the payload is the next bytes of a parcel; the one that makes it whole is answered."""

    number: int
    parcel: int  # counts what this incarnation of the producer sends
    at: int  # byte offset of the payload within the parcel
    total_bytes: int  # at least one
    xxh3: int  # of the payload
    is_repeated: bool = False  # the parcel was sent before, and may be there


class Want(msgspec.Struct, frozen=True, kw_only=True, tag="want"):
    """Up: send these bytes."""

    number: int
    slices: tuple[RowSlice, ...]


class Docked(msgspec.Struct, frozen=True, kw_only=True, tag="docked"):
    """Down: the parcel is in the memory of the queue's host, under the producer's name."""

    number: int
    segment: str
    offset: int  # of the parcel's first byte


class Given(msgspec.Struct, frozen=True, kw_only=True, tag="given"):
    """Down: the payload is what was wanted, in its order."""

    number: int
    sizes: tuple[int, ...]  # bytes of each slice; FREED where the row was freed, which has no bytes here
    xxh3: int  # of the payload


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Down: this raised."""

    number: int
    failed: Failed


Up = Part | Want
Down = Docked | Given | Refused

encode: Final = msgspec.msgpack.Encoder().encode
_UP: Final = msgspec.msgpack.Decoder(Up)
_DOWN: Final = msgspec.msgpack.Decoder(Down)


class Span(NamedTuple):
    """Bytes from `start` to `stop`."""

    start: int
    stop: int


def read_up(data: bytes, peer: str) -> Up:
    """Read what a dock's peer said.

    Raises:
        RowLinkError: it is none of that.
    """
    return _read(_UP, data, peer)


def read_down(data: bytes, peer: str) -> Down:
    """Read what a dock said.

    Raises:
        RowLinkError: it is none of that.
    """
    return _read(_DOWN, data, peer)


def spans(nbytes: int, part_bytes: int = PART_BYTES) -> Iterator[Span]:
    """Cut so many bytes into parts; none of none."""
    for start in range(0, nbytes, part_bytes):
        yield Span(start, min(start + part_bytes, nbytes))


def requests_for(refs: Iterable[TensorRef], part_bytes: int = PART_BYTES) -> list[list[RowSlice]]:
    """Cut arrays into slices and deal these to requests, in order: no request is for more than a part.

    Args:
        refs: of the arrays.
        part_bytes: the most that one request asks for.
    """
    requests: list[list[RowSlice]] = []
    room = 0
    for piece in (piece for ref in refs for piece in _slices(ref, part_bytes)):
        nbytes = piece.stop - piece.start
        if not requests or nbytes > room:
            requests.append([])
            room = part_bytes
        requests[-1].append(piece)
        room -= nbytes
    return requests


def array_bytes(ref: TensorRef) -> int:
    """Return the size of an array."""
    return np.dtype(ref.dtype).itemsize * math.prod(ref.shape)


def _slices(ref: TensorRef, part_bytes: int) -> Iterator[RowSlice]:
    """Return the slices of an array; one, empty, where it has no bytes."""
    for span in [*spans(array_bytes(ref), part_bytes)] or [Span(0, 0)]:
        yield RowSlice(ref=ref, start=span.start, stop=span.stop)


def _read(decoder: "msgspec.msgpack.Decoder[R]", data: bytes, peer: str) -> R:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RowLinkError(peer, f"carried what nobody says: {error}") from error
