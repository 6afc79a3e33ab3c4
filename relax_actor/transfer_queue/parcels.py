"""Rows on their way between hosts: what is said of them, and how they are cut into messages. Pure.

A *parcel* is all arrays of one put, side by side as they will lie in memory. It travels in parts, because a
message has a limit and an array has none but `PARCEL_BYTES`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.errors import RelaxError
from relax_actor.protocol import TensorRef

PART_BYTES: Final = 4 << 20
"""The bytes of one message: several may be on their way at once (`actor.mailbox.CREDIT_BYTES`)."""

PARCEL_BYTES: Final = 8 << 30
"""A put that is larger is refused: as many parts as may wait for one actor hold no more."""


class ParcelTooLargeError(RelaxError):
    """Rows of one put that are more than one parcel may hold."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        super().__init__(
            f"rows of {nbytes} bytes cannot be put from another host: a parcel holds {PARCEL_BYTES}"
            "\n\nhint: put fewer rows at once, or run their producer on the queue's host"
        )


class ParcelPart(msgspec.Struct, frozen=True, kw_only=True):
    """Producer to dock: some bytes of a parcel."""

    parcel: int  # counts the parcels of this incarnation of the producer
    at: int  # byte offset of `data` within the parcel
    total_bytes: int
    data: npt.NDArray[np.uint8]  # [bytes], at least one
    is_repeated: bool = False  # the parcel was sent before, and may be there


class Docked(msgspec.Struct, frozen=True, kw_only=True):
    """Dock to producer: the parcel is in the memory of the queue's host, under the producer's name."""

    segment: str
    offset: int  # of the parcel's first byte


class RowSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Reader to dock: these bytes of an array are wanted."""

    ref: TensorRef
    start: int
    stop: int


def parts_of(
    parcel: int, data: npt.NDArray[np.uint8], *, is_repeated: bool, part_bytes: int = PART_BYTES
) -> Iterator[ParcelPart]:
    """Cut a parcel into parts, which look into it; at least one.

    Args:
        parcel: its number.
        data: uint8 [bytes], at least one.
        is_repeated: whether it was sent before.
        part_bytes: the most in one part.
    """
    for at in range(0, data.nbytes, part_bytes):
        yield ParcelPart(
            parcel=parcel,
            at=at,
            total_bytes=data.nbytes,
            data=data[at : at + part_bytes],
            is_repeated=is_repeated,
        )


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


def assembled(ref: TensorRef, pieces: Sequence[tuple[int, npt.NDArray[np.uint8]]]) -> npt.NDArray[Any]:
    """Put an array together again, read-only.

    Args:
        ref: what it was.
        pieces: byte offsets and bytes, of all its slices.
    """
    flat = np.empty(array_bytes(ref), np.uint8)
    for start, data in pieces:
        flat[start : start + data.nbytes] = data
    array = flat.view(ref.dtype).reshape(ref.shape)
    array.flags.writeable = False
    return array


def array_bytes(ref: TensorRef) -> int:
    """Return the size of an array."""
    return np.dtype(ref.dtype).itemsize * math.prod(ref.shape)


def _slices(ref: TensorRef, part_bytes: int) -> Iterator[RowSlice]:
    """Return the slices of an array; one, empty, where it has no bytes."""
    nbytes = array_bytes(ref)
    for start in range(0, max(nbytes, 1), part_bytes):
        yield RowSlice(ref=ref, start=start, stop=min(start + part_bytes, nbytes))
