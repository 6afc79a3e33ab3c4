"""Rows in shared memory: written once by who makes them, read in place by everybody else.

All arrays of one put lie side by side in warm memory (`transport.pool`), each aligned to a cache line, under
one segment name. The ledger counts who needs a segment; the queue actor owns the name and unlinks it, and the
memory is written again by its producer.
"""

import functools
import itertools
import math
import time
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.errors import RelaxError
from relax_actor.ids import Holder
from relax_actor.protocol import TensorRef
from transport.mappings import Mappings
from transport.pool import ALIGN_BYTES, Piece, SegmentPool
from transport.shm import SegmentBusyError, SegmentMissingError, SegmentSpaceError, ShmSpace

_KINDS = "biufc"  # bool, integers, floats, complex: what a dtype's name says completely

PATIENCE_S = 10.0
"""How long rows wait for shared memory: far longer than it takes to move some into files."""

LOOK_S = 0.02

Record = TypeVar("Record", bound=msgspec.Struct)


class RowRefError(RelaxError):
    """A reference that does not lie within its segment, or is of no known dtype."""

    def __init__(self, ref: TensorRef, fact: str) -> None:
        self.ref, self.fact = ref, fact
        super().__init__(f"{ref.dtype} {list(ref.shape)} at byte {ref.offset} of `{ref.segment}`: {fact}")


class RowWriter:
    """Writes rows into memory that belongs to `holder`.

    Args:
        space: the run's shared memory.
        holder: the owner in the segments' names; its segments are swept after its death.
        on_full: told once for each write that has to wait until others make room.
        patience_s: how long a write waits for that.
    """

    def __init__(
        self,
        space: ShmSpace,
        holder: Holder,
        *,
        on_full: Callable[[SegmentSpaceError], None] = lambda _error: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._pool = SegmentPool(space, holder.name, holder.incarnation)
        self._on_full, self._patience_s = on_full, patience_s

    def write(self, rows: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[dict[str, TensorRef]]:
        """Copy rows of named arrays to where others can read them, all under one new segment name.

        Returns:
            For each row the references of its arrays; nothing, and no segment, for no rows.

        Raises:
            SegmentSpaceError: shared memory is full and stayed so; nothing was left behind.
            SegmentMissingError: the holder's memory was swept: it is taken for dead.
            ValueError: an array that is not of numbers.
        """
        if not rows:
            return []
        layout, nbytes = layout_of(rows)
        piece = self._place(max(1, nbytes))
        return [
            {
                name: written_at(piece.segment.buf, piece.name, piece.offset + offsets[name], array)
                for name, array in row.items()
            }
            for row, offsets in zip(rows, layout, strict=True)
        ]

    def _place(self, nbytes: int) -> Piece:
        """Return room; what was generated is worth waiting for it."""
        deadline, is_told = time.monotonic() + self._patience_s, False
        while True:
            try:
                return self._pool.place(nbytes)
            except SegmentSpaceError as error:
                if time.monotonic() >= deadline:
                    raise
                if not is_told:
                    self._on_full(error)
                is_told = True
                time.sleep(LOOK_S)


class RowReader:
    """Reads rows in place.

    A view holds a lease of its memory: nothing else is written there while it lives, also when nobody needs
    the row any more. What is kept for long belongs into a copy.

    Args:
        space: the run's shared memory.
        spill: where the queue puts rows that memory has no room for (`memory.spill_space`).
    """

    def __init__(self, space: ShmSpace, spill: ShmSpace | None = None) -> None:
        self._space, self._spill = space, spill
        self._mappings = Mappings(space)
        # Both hold what views hold: one lease, and one descriptor, for all that lies in one arena.
        self._leased: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._arenas: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def read(self, ref: TensorRef) -> npt.NDArray[Any]:
        """Return a read-only view of an array; it stays valid when the segment is unlinked or closed.

        Raises:
            SegmentMissingError: the segment was freed: nobody needs the row any more.
            RowRefError: the reference is wrong.
        """
        memory = self._memory(ref.segment)
        dtype = _dtype(ref)
        end = ref.offset + dtype.itemsize * math.prod(ref.shape)
        if ref.offset < 0 or any(n < 0 for n in ref.shape) or end > len(memory):
            raise RowRefError(ref, f"not within its {len(memory)} bytes")
        return np.ndarray(ref.shape, dtype, buffer=memory, offset=ref.offset)

    def trim(self) -> None:
        """Unmap what nobody can find any more."""
        self._mappings.trim()

    def close(self) -> None:
        """Unmap everything; views stay valid. Idempotent."""
        self._mappings.close()

    def _memory(self, name: str) -> Any:
        """Return the memory under a name, uint8 [bytes]; the views of it are what keeps it leased."""
        memory = self._leased.get(name)
        if memory is None:
            memory = self._leased[name] = self._found(name)
        return memory

    def _found(self, name: str) -> Any:
        try:
            return self._lease(name)
        except SegmentMissingError:
            if self._spill is None:
                raise
            return self._spill.attach(name).buf.obj  # read once or twice: not a mapping to keep

    def _lease(self, name: str) -> Any:
        inode = self._space.inode(name)
        memory = self._arenas.get(inode)
        if memory is None:
            memory = self._leased_anew(name)
            self._space.inode(name)  # freed before the lease, its writer may not have seen it
            self._arenas[inode] = memory
        return memory

    def _leased_anew(self, name: str) -> Any:
        known = len(self._mappings)
        try:
            segment = self._mappings.lease(name)
        except SegmentBusyError as error:  # its writer is about to use it again
            raise SegmentMissingError(name) from error
        if len(self._mappings) > known:
            self._mappings.trim()
        return segment.buf.obj  # what numpy makes the base of its views


def segments_of(record: msgspec.Struct) -> frozenset[str]:
    """Return the segments that a reference, or a record with references, is in."""
    refs = [record] if isinstance(record, TensorRef) else refs_of(record)
    return frozenset(ref.segment for ref in refs)


def refs_of(record: msgspec.Struct) -> list[TensorRef]:
    """Return the references in the fields of a record, also in those that are dicts."""
    direct, dicts = _ref_fields(type(record))
    values = [getattr(record, name) for name in direct]
    for name in dicts:
        values += getattr(record, name).values()
    return [value for value in values if isinstance(value, TensorRef)]


def renamed(record: Record, old: str, new: str, shift: int = 0) -> Record:
    """Return a reference, or a record with references, after a segment got another name.

    Args:
        record: with references into any segments.
        old: the segment's name in them.
        new: its name from now on.
        shift: how many bytes further on its arrays are there.
    """
    if isinstance(record, TensorRef):
        moved_ref: Record = _renamed_value(record, old, new, shift)
        return moved_ref
    changed = {}
    for name in itertools.chain(*_ref_fields(type(record))):
        value = getattr(record, name)
        moved = _renamed_value(value, old, new, shift)
        if moved is not value:
            changed[name] = moved
    return msgspec.structs.replace(record, **changed) if changed else record


@functools.cache
def _ref_fields(record: type[msgspec.Struct]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields of a record that may be references, and those that may be dicts of some."""
    hints = {name: {hint, *typing.get_args(hint)} for name, hint in typing.get_type_hints(record).items()}
    origins = {name: {typing.get_origin(each) for each in hint} for name, hint in hints.items()}
    dicts = tuple(name for name in record.__struct_fields__ if dict in origins[name])
    direct = (name for name in record.__struct_fields__ if TensorRef in hints[name] and name not in dicts)
    return tuple(direct), dicts


def _renamed_value(value: Any, old: str, new: str, shift: int) -> Any:
    """Return the value itself where nothing of it changes."""
    if isinstance(value, TensorRef):
        is_in_it = value.segment == old
        return TensorRef(new, value.offset + shift, value.dtype, value.shape) if is_in_it else value
    if isinstance(value, dict) and value:
        moved = {
            key: _renamed_value(each, old, new, shift) if isinstance(each, TensorRef) else each
            for key, each in value.items()
        }
        return moved if any(moved[key] is not value[key] for key in value) else value
    return value


def _dtype(ref: TensorRef) -> np.dtype[Any]:
    try:
        dtype = np.dtype(ref.dtype)
    except TypeError as error:
        raise RowRefError(ref, "no such dtype") from error
    if dtype.kind not in _KINDS:
        raise RowRefError(ref, "not a dtype of numbers")
    return dtype


def layout_of(rows: Sequence[Mapping[str, npt.NDArray[Any]]]) -> tuple[list[dict[str, int]], int]:
    """Return for each row the offsets of its arrays, and how many bytes all need.

    Raises:
        ValueError: an array that is not of numbers.
    """
    layout: list[dict[str, int]] = []
    end = 0
    for row in rows:
        layout.append({})
        for name, array in row.items():
            if array.dtype.kind not in _KINDS:
                raise ValueError(f"`{name}` is of dtype {array.dtype}; rows are of numbers")
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            layout[-1][name], end = start, start + array.nbytes
    return layout, end


def written_at(buffer: memoryview, segment: str, offset: int, array: npt.NDArray[Any]) -> TensorRef:
    """Copy an array into a buffer that others know, or will know, as `segment`; return where it is."""
    dtype = _name(array.dtype)
    np.ndarray(array.shape, dtype, buffer=buffer, offset=offset)[...] = array
    return TensorRef(segment=segment, offset=offset, dtype=dtype, shape=array.shape)


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    """Return the name without byte order: rows are stored in the machine's own."""
    return dtype.name
