"""Rows in shared memory: written once by who makes them, read in place by everybody else.

All arrays of one put lie in one segment, each aligned to a cache line: a segment costs system calls and page
faults, an array costs a copy. The ledger counts who needs a segment; the queue actor owns and unlinks it.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.errors import RelaxError
from relax_actor.ids import Holder
from relax_actor.protocol import TensorRef
from transport.shm import Segment, ShmSpace

_ALIGN_BYTES = 64
_KINDS = "biufc"  # bool, integers, floats, complex: what a dtype's name says completely

Record = TypeVar("Record", bound=msgspec.Struct)


class RowRefError(RelaxError):
    """A reference that does not lie within its segment, or is of no known dtype."""

    def __init__(self, ref: TensorRef, fact: str) -> None:
        self.ref, self.fact = ref, fact
        super().__init__(f"{ref.dtype} {list(ref.shape)} at byte {ref.offset} of `{ref.segment}`: {fact}")


class RowWriter:
    """Writes rows into new segments that belong to `holder`.

    Args:
        space: the run's shared memory.
        holder: the owner in the segments' names; its segments are swept after its death.
    """

    def __init__(self, space: ShmSpace, holder: Holder) -> None:
        self._space = space
        self._holder = holder
        self._segments = 0

    def write(self, rows: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[dict[str, TensorRef]]:
        """Copy rows of named arrays into one new segment.

        Returns:
            For each row the references of its arrays; nothing, and no segment, for no rows.

        Raises:
            SegmentSpaceError: shared memory is full; nothing was left behind.
            ValueError: an array that is not of numbers.
        """
        if not rows:
            return []
        layout, nbytes = _layout(rows)
        with self._create(max(1, nbytes)) as segment:
            refs = []
            for row, offsets in zip(rows, layout, strict=True):
                refs.append({name: _put(segment, offsets[name], array) for name, array in row.items()})
        return refs

    def _create(self, nbytes: int) -> Segment:
        self._segments += 1
        label = f"rows{self._segments}"
        return self._space.create(self._holder.name, self._holder.incarnation, label, nbytes)


class RowReader:
    """Reads rows in place.

    Args:
        space: the run's shared memory.
        cache: how many segments stay mapped, the least recently read go first. A mapping keeps the memory
            of an unlinked segment, and a file descriptor.
    """

    def __init__(self, space: ShmSpace, cache: int = 32) -> None:
        self._space = space
        self._cache = cache
        self._segments: OrderedDict[str, Segment] = OrderedDict()

    def read(self, ref: TensorRef) -> npt.NDArray[Any]:
        """Return a read-only view of an array; it stays valid when the segment is unlinked or closed.

        Raises:
            SegmentMissingError: the segment was freed: nobody needs the row any more.
            RowRefError: the reference is wrong.
        """
        segment = self._mapped(ref.segment)
        dtype = _dtype(ref)
        end = ref.offset + dtype.itemsize * math.prod(ref.shape)
        if ref.offset < 0 or any(n < 0 for n in ref.shape) or end > segment.nbytes:
            raise RowRefError(ref, f"not within its {segment.nbytes} bytes")
        return segment.ndarray(dtype, ref.shape, ref.offset)

    def close(self) -> None:
        """Unmap everything; views stay valid. Idempotent."""
        while self._segments:
            self._segments.popitem()[1].close()

    def _mapped(self, name: str) -> Segment:
        if name not in self._segments:
            self._segments[name] = self._space.attach(name)
        self._segments.move_to_end(name)
        while len(self._segments) > max(1, self._cache):
            self._segments.popitem(last=False)[1].close()
        return self._segments[name]


def segments_of(record: msgspec.Struct) -> frozenset[str]:
    """Return the segments that a reference, or a record with references, is in."""
    return frozenset(ref.segment for ref in _refs(record))


def renamed(record: Record, old: str, new: str) -> Record:
    """Return a reference, or a record with references, after a segment got another name."""
    if isinstance(record, TensorRef):
        return msgspec.structs.replace(record, segment=new) if record.segment == old else record
    if all(ref.segment != old for ref in _refs(record)):
        return record
    fields = msgspec.structs.asdict(record)
    return msgspec.structs.replace(
        record, **{name: _renamed_value(value, old, new) for name, value in fields.items()}
    )


def _renamed_value(value: Any, old: str, new: str) -> Any:
    if isinstance(value, TensorRef):
        return renamed(value, old, new)
    if isinstance(value, dict):
        return {key: renamed(v, old, new) if isinstance(v, TensorRef) else v for key, v in value.items()}
    return value


def _refs(record: msgspec.Struct) -> list[TensorRef]:
    """Return the references in the fields of a record, also in those that are dicts."""
    if isinstance(record, TensorRef):
        return [record]
    values = list(msgspec.structs.asdict(record).values())
    inner = [each for value in values if isinstance(value, dict) for each in value.values()]
    return [value for value in values + inner if isinstance(value, TensorRef)]


def _dtype(ref: TensorRef) -> np.dtype[Any]:
    try:
        dtype = np.dtype(ref.dtype)
    except TypeError as error:
        raise RowRefError(ref, "no such dtype") from error
    if dtype.kind not in _KINDS:
        raise RowRefError(ref, "not a dtype of numbers")
    return dtype


def _layout(rows: Sequence[Mapping[str, npt.NDArray[Any]]]) -> tuple[list[dict[str, int]], int]:
    """Return for each row the offsets of its arrays, and how many bytes all need."""
    layout: list[dict[str, int]] = []
    end = 0
    for row in rows:
        layout.append({})
        for name, array in row.items():
            if array.dtype.kind not in _KINDS:
                raise ValueError(f"`{name}` is of dtype {array.dtype}; rows are of numbers")
            start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
            layout[-1][name], end = start, start + array.nbytes
    return layout, end


def _put(segment: Segment, offset: int, array: npt.NDArray[Any]) -> TensorRef:
    dtype = array.dtype.name  # without byte order: stored in the machine's own
    segment.ndarray(dtype, array.shape, offset)[...] = array
    return TensorRef(segment=segment.name, offset=offset, dtype=dtype, shape=array.shape)
