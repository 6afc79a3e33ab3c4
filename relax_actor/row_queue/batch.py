"""Rows that a consumer has, and how it looks at them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.ids import LeaseId
from relax_actor.protocol import TensorRef
from relax_actor.row_queue.records import Columns, RowPart
from relax_actor.row_queue.ways import Read


@dataclass(slots=True)
class OpenLease:
    """A lease, and how many of its batches are not acknowledged."""

    lease_id: LeaseId
    batches: int


class Batch:
    """Rows that a consumer has until it acknowledges them; a rank's share of a turn may be empty.

    Args:
        lease: what they are lent under.
        parts: where they are.
        shared: by group, where that is which its rows have in common.
        read: reads an array in place.
        was_waited_for: whether they were not there yet when they were asked for.
    """

    def __init__(
        self,
        lease: OpenLease,
        parts: Sequence[RowPart],
        shared: Mapping[int, Columns],
        read: Read,
        *,
        was_waited_for: bool,
    ) -> None:
        self.lease, self.was_waited_for = lease, was_waited_for
        self._parts, self._shared, self._read = parts, shared, read

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the rows: those that the group needs."""
        common = next(iter(self._shared.values()), {})
        return (*(self._parts[0].columns if self._parts else ()), *common)

    def __len__(self) -> int:
        return sum(part.count for part in self._parts)

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows."""
        return [row for part in self._parts for row in range(part.first, part.first + part.count)]

    @property
    def keys(self) -> list[int]:
        """The group of each row, where rows have groups."""
        return [key for part in self._parts for key in part.keys]

    def lengths(self, name: str) -> list[int]:
        """Return the length of each row's field."""
        if self._is_shared(name):
            return [self._shared[key][name].lengths[0] for key in self.keys]
        return [length for part in self._parts for length in part.columns[name].lengths]

    def packed(self, name: str) -> npt.NDArray[Any]:
        """Return a field of all rows end to end, [sum of lengths, *tail]; in place where it lies so.

        Raises:
            ValueError: there are no rows.
            SegmentMissingError: the rows are not here any more: they were dropped.
        """
        if self._is_shared(name):
            return np.concatenate(self.views(name))
        found = [self._read(part.columns[name].ref()) for part in self._parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def views(self, name: str) -> list[npt.NDArray[Any]]:
        """Return a field of each row, [length, *tail], in place and read-only.

        Of a shared field the rows of a group get the same view.
        """
        if self._is_shared(name):
            shared = self.shared(name)
            return [shared[key] for key in self.keys]
        found: list[npt.NDArray[Any]] = []
        for part in self._parts:
            values, at = self._read(part.columns[name].ref()), 0
            for length in part.columns[name].lengths:
                found.append(values[at : at + length])
                at += length
        return found

    def shared(self, name: str) -> dict[int, npt.NDArray[Any]]:
        """Return by group what its rows have in common, [length, *tail], in place and read-only."""
        return {key: self._read(columns[name].ref()) for key, columns in self._shared.items()}

    def _is_shared(self, name: str) -> bool:
        return any(name in columns for columns in self._shared.values())


def refs_of(parts: Sequence[RowPart], shared: Mapping[int, Columns]) -> Iterator[TensorRef]:
    """Yield where everything is that a batch may read."""
    for columns in (*(part.columns for part in parts), *shared.values()):
        for column in columns.values():
            yield column.ref()


def cuts(parts: Sequence[RowPart], max_rows: int) -> Iterator[list[RowPart]]:
    """Yield parts of at most `max_rows` rows together."""
    taken: list[RowPart] = []
    room = max_rows
    for part in parts:
        at = 0
        while at < part.count:
            end = min(part.count, at + room)
            taken.append(part.cut(at, end))
            room -= end - at
            at = end
            if not room:
                yield taken
                taken, room = [], max_rows
    if taken:
        yield taken
