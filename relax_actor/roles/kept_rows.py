"""What an actor keeps of rows that go to another host, or come from there: memory, and arrays."""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relax_actor.protocol import TensorRef
from transport.shm import SegmentMissingError

ROUND_BYTES: Final = 64 << 10


class RowMemory:
    """Memory for parcels: what was written before has its pages, which cost more than copying.

    Args:
        most_bytes: to keep.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes: of the smallest piece that has them, unless most of it would be of no use."""
        fitting = [piece for piece in self._kept if nbytes <= piece.nbytes <= 2 * nbytes + ROUND_BYTES]
        if not fitting:
            return np.zeros(-(-nbytes // ROUND_BYTES) * ROUND_BYTES, np.uint8)[:nbytes]
        piece = min(fitting, key=len)
        self._kept = [each for each in self._kept if each is not piece]
        return piece[:nbytes]

    def give_back(self, data: npt.NDArray[np.uint8]) -> None:
        """Keep what `take` returned, instead of what was not needed for longest where that is too much."""
        piece = data.base if isinstance(data.base, np.ndarray) else data
        self._kept.append(piece)
        while sum(each.nbytes for each in self._kept) > self._most_bytes:
            self._kept.pop(0)


class RowCache:
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
