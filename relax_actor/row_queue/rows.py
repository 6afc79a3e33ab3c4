"""The rows that are in a queue: their fields, and which consumer groups still need them. Pure.

What was put at once stays together as an extent, so that most of what is done costs the same for one row as
for all. An extent goes, with its memory, when every group is done with all of its rows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

from relax_actor.row_queue.extent import Extent
from relax_actor.row_queue.records import (
    Columns,
    Ranges,
    RowPart,
    RowsPut,
    SharedPut,
    ranges,
)
from relax_actor.row_queue.shared import Shared
from relax_actor.row_queue.spec import QueueSpec


class Rows:
    """All extents, by row.

    Args:
        spec: the queue's.
    """

    def __init__(self, spec: QueueSpec) -> None:
        self._spec = spec
        self._extents: dict[int, Extent] = {}  # by first row, ascending
        self._starts: list[int] = []
        self._users: dict[str, int] = {}  # extents by segment
        self._freed: list[str] = []
        self.shared = Shared()
        self.count = 0

    def add(self, event: RowsPut) -> Extent:
        """Take new rows."""
        extent = Extent(
            producer=event.producer,
            seq=event.seq,
            first=event.first,
            count=event.count,
            keys=event.keys,
            group_rows=event.group_rows,
            masks=[0] * event.count,
            settled={group.name: set() for group in self._spec.groups},
            open_groups=len(self._spec.groups),
        )
        self._extents[event.first] = extent
        self._starts.append(event.first)
        self.count += event.count
        if self._spec.shared:
            common = self.shared.came(event.first, event.keys, event.group_rows)
            extent.masks[: len(event.keys)] = [self._spec.mask(tuple(columns)) for columns in common]
        self.extend(extent, extent.first, extent.end, event.columns)
        return extent

    def share(self, event: SharedPut) -> None:
        """Take what the rows of groups have in common."""
        for segment in self.shared.add(event):
            self._use(segment)

    def end(self) -> None:
        """Expect no further rows."""
        for segment in self.shared.end():
            self._release(segment)

    def extend(self, extent: Extent, low: int, high: int, columns: Columns) -> None:
        """Take further fields of rows of an extent."""
        before = extent.segments
        extent.add(low, high, columns, self._spec.mask(tuple(columns)))
        for segment in extent.segments - before:
            self._use(segment)

    def find(self, row: int) -> Extent | None:
        """Return the extent of a row that is here."""
        at = bisect_right(self._starts, row) - 1
        if at < 0:
            return None
        extent = self._extents[self._starts[at]]
        return extent if row < extent.end else None

    def of(self, rows: Ranges) -> Iterator[tuple[Extent, int, int]]:
        """Yield rows extent by extent; those that are not here are passed over."""
        for low, high in rows:
            at = low
            while at < high:
                extent = self.find(at)
                end = at + 1 if extent is None else min(high, extent.end)
                if extent is not None:
                    yield extent, at, end
                at = end

    def is_live(self, row: int) -> bool:
        """Whether some group is not done with a row."""
        extent = self.find(row)
        return extent is not None and any(row not in settled for settled in extent.settled.values())

    def has(self, row: int, bits: int) -> bool:
        """Whether a row that is here has all of these fields."""
        extent = self.find(row)
        return extent is not None and extent.masks[row - extent.first] & bits == bits

    def all_live(self, rows: Ranges) -> bool:
        """Whether that is so of all rows."""
        return all(self.is_live(row) for low, high in rows for row in range(low, high))

    def lacking(self, rows: Ranges, bits: int) -> set[int]:
        """Return the rows that have none of these fields.

        Raises:
            ValueError: a row has some of them.
        """
        found: set[int] = set()
        for extent, low, high in self.of(rows):
            for row in range(low, high):
                have = extent.masks[row - extent.first] & bits
                if not have:
                    found.add(row)
                elif have != bits:
                    raise ValueError(f"row {row} has some of these fields and lacks others")
        return found

    def parts(self, rows: Ranges, names: Iterable[str]) -> list[RowPart]:
        """Return rows as a consumer gets them."""
        names = tuple(name for name in names if name not in self._spec.shared)
        found: list[RowPart] = []
        for extent, low, high in self.of(rows):
            for end, columns in extent.columns(low, high, names):
                keys = extent.keys[low - extent.first : end - extent.first]
                found.append(RowPart(low, end - low, columns, keys))
                low = end  # noqa: PLW2901 - where the next piece begins
        return found

    def common(self, parts: Iterable[RowPart], names: Iterable[str]) -> dict[int, Columns]:
        """Return by group what rows have in common, as a consumer gets it."""
        shared = [name for name in names if name in self._spec.shared]
        if not shared:
            return {}
        columns = {key: self.shared.columns(key) for part in parts for key in part.keys}
        return {key: {name: each[name] for name in shared} for key, each in columns.items()}

    def length(self, row: int, name: str) -> int:
        """Return the length of a row's field."""
        extent = self.find(row)
        assert extent is not None  # noqa: S101 - only rows that are here are dealt
        _, columns = next(extent.columns(row, row + 1, (name,)))
        return columns[name].lengths[0]

    def group_of(self, row: int) -> tuple[int, int]:
        """Return the group of a row, and how many rows that has; one without is a group by itself."""
        extent = self.find(row)
        assert extent is not None  # noqa: S101 - only rows that are here are dealt
        if not extent.keys:
            return -1 - row, 1
        return extent.keys[row - extent.first], extent.group_rows

    def keys_of(self, rows: Ranges) -> set[int]:
        """Return the groups of rows, as far as they are here and have one."""
        return {
            key
            for extent, low, high in self.of(rows)
            for key in extent.keys[low - extent.first : high - extent.first]
        }

    def short(self, group: str, wanted: Mapping[int, int]) -> Ranges:
        """Return the rows that a group is not done with and of whose key not enough were put.

        Args:
            group: of consumers.
            wanted: how many are enough, for the keys of which some are gone.
        """
        found: dict[int, list[int]] = {}
        enough: dict[int, int] = {}
        for extent in self.extents():
            for row, key in enumerate(extent.keys, extent.first):
                if row not in extent.settled[group]:
                    found.setdefault(key, []).append(row)
                    enough[key] = wanted.get(key, extent.group_rows)
        return ranges(sorted(row for key, rows in found.items() if len(rows) < enough[key] for row in rows))

    def is_settled(self, row: int, group: str) -> bool:
        """Whether a group is done with a row."""
        extent = self.find(row)
        return extent is None or row in extent.settled[group]

    def settle(self, extent: Extent, low: int, high: int, group: str) -> int:
        """Let a group be done with rows of an extent; return with how many it was not before."""
        settled = extent.settled[group]
        before = len(settled)
        settled.update(range(low, high))
        if len(settled) == extent.count > before:
            extent.open_groups -= 1
            if not extent.open_groups:
                self._remove(extent)
        return len(settled) - before

    def settled_rows(self, group: str) -> Ranges:
        """Return the rows that are here and a group is done with."""
        return ranges(row for extent in self.extents() for row in sorted(extent.settled[group]))

    def extents(self) -> Iterable[Extent]:
        """Return all extents, in the order of their rows."""
        return self._extents.values()

    def segments(self) -> set[str]:
        """Return every segment that is needed."""
        return set(self._users)

    def needs(self, segment: str) -> bool:
        """Whether a segment is needed."""
        return segment in self._users

    def take_freed(self) -> list[str]:
        """Return the segments that nobody needs any more since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def _remove(self, extent: Extent) -> None:
        del self._extents[extent.first]
        self._starts.pop(bisect_right(self._starts, extent.first) - 1)
        self.count -= extent.count
        for segment in extent.segments:
            self._release(segment)
        if self._spec.shared:
            for segment in self.shared.went(extent.keys):
                self._release(segment)

    def _use(self, segment: str) -> None:
        self._users[segment] = self._users.get(segment, 0) + 1

    def _release(self, segment: str) -> None:
        self._users[segment] -= 1
        if not self._users[segment]:
            del self._users[segment]
            self._freed.append(segment)
