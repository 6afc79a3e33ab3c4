"""The bytes of rows: laid out field by field, copied once, read where they lie."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.row_queue.records import Column, Columns
from transport.pool import ALIGN_BYTES

Values = npt.NDArray[Any] | Sequence[npt.NDArray[Any]]
"""A field of some rows: one array a row, which differ in length only, or one array [rows] of numbers."""

SharedValues = Mapping[int, npt.NDArray[Any]]
"""A field that the rows of each group have in common: one array a group."""

_KINDS = "biufc"  # bool, integers, floats, complex: what a dtype's name says completely


class Layout:
    """Fields as they will lie in memory, one after the other.

    Args:
        fields: at least one.

    Raises:
        ValueError: arrays that are not of numbers, or that differ in dtype or shape but for their length.
    """

    def __init__(self, fields: Mapping[str, Values]) -> None:
        self._fields: list[tuple[str, list[npt.NDArray[Any]], Column]] = []
        self.nbytes = 0
        for name, values in fields.items():
            arrays, column = _column(name, values, self.nbytes)
            self._fields.append((name, arrays, column))
            end = self.nbytes + sum(column.lengths) * column.step_bytes
            self.nbytes = -(-end // ALIGN_BYTES) * ALIGN_BYTES

    def copy_to(self, buffer: memoryview, segment: str, offset: int) -> Columns:
        """Copy all fields into a buffer that others know, or will know, as `segment`."""
        columns: Columns = {}
        for name, arrays, column in self._fields:
            placed = Column(segment, offset + column.offset, column.dtype, column.tail, column.lengths)
            ref = placed.ref()
            out = np.ndarray(ref.shape, ref.dtype, buffer=buffer, offset=ref.offset)
            if len(arrays) == 1:
                out[...] = arrays[0]
            else:
                np.concatenate(arrays, out=out)
            columns[name] = placed
        return columns


def by_group(shared: Mapping[str, SharedValues]) -> tuple[tuple[int, ...], dict[str, Values]]:
    """Return the groups of shared fields, and the fields' values in that order.

    Raises:
        ValueError: fields of different groups.
    """
    keys = tuple(next(iter(shared.values()))) if shared else ()
    for name, values in shared.items():
        if {*values} != {*keys}:
            raise ValueError(f"`{name}` is of groups {sorted(values)}, and others of {sorted(keys)}")
    return keys, {name: [values[key] for key in keys] for name, values in shared.items()}


def _column(name: str, values: Values, offset: int) -> tuple[list[npt.NDArray[Any]], Column]:
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise ValueError(f"`{name}` is {list(values.shape)}; one number a row, or a list of arrays")
        arrays, lengths = [values], (1,) * len(values)
    else:
        arrays = [*values]
        lengths = tuple(len(array) if array.ndim else 0 for array in arrays)
    if not arrays:
        raise ValueError(f"`{name}` has no rows")
    first = arrays[0]
    for array in arrays:
        if array.dtype != first.dtype or array.shape[1:] != first.shape[1:] or not array.ndim:
            raise ValueError(
                f"`{name}` has a {array.dtype} {list(array.shape)} beside a {first.dtype} {list(first.shape)}"
            )
    if first.dtype.kind not in _KINDS:
        raise ValueError(f"`{name}` is of dtype {first.dtype}; rows are of numbers")
    return arrays, Column("", offset, first.dtype.name, first.shape[1:], lengths)
