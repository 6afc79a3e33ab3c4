"""The bytes of rows: written once, field by field, into shared memory; read where they lie."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.row_queue.records import Column, Columns
from relax_actor.transfer_queue.storage import RowReader
from transport.pool import ALIGN_BYTES, SegmentPool

Values = npt.NDArray[Any] | Sequence[npt.NDArray[Any]]
"""A field of some rows: one array a row, which differ in length only, or one array [rows] of numbers."""

_KINDS = "biufc"  # bool, integers, floats, complex: what a dtype's name says completely


def write(pool: SegmentPool, fields: Mapping[str, Values]) -> Columns:
    """Copy fields into shared memory, all under one segment name.

    Args:
        pool: whose memory it is.
        fields: at least one, all of as many rows.

    Raises:
        ValueError: arrays that are not of numbers, or that differ in dtype or shape but for their length.
        SegmentSpaceError: there is no room.
    """
    layout: dict[str, tuple[list[npt.NDArray[Any]], Column]] = {}
    end = 0
    for name, values in fields.items():
        arrays, column = _column(name, values, end)
        layout[name] = arrays, column
        nbytes = sum(column.lengths) * column.step_bytes
        end = -(-(end + nbytes) // ALIGN_BYTES) * ALIGN_BYTES
    piece = pool.place(max(1, end))
    columns: Columns = {}
    for name, (arrays, column) in layout.items():
        placed = Column(piece.name, piece.offset + column.offset, column.dtype, column.tail, column.lengths)
        ref = placed.ref()
        out = np.ndarray(ref.shape, ref.dtype, buffer=piece.segment.buf, offset=ref.offset)
        if len(arrays) == 1:
            out[...] = arrays[0]
        else:
            np.concatenate(arrays, out=out)
        columns[name] = placed
    return columns


def view(reader: RowReader, column: Column) -> npt.NDArray[Any]:
    """Return the values of a column end to end, in place and read-only, [sum of lengths, *tail].

    Raises:
        SegmentMissingError: the rows are not here any more.
    """
    return reader.read(column.ref())


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
