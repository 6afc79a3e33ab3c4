"""The rows that are in a queue: their fields, and which consumer groups still need them. Pure.

What was put at once stays together as an extent, so that most of what is done costs the same for one row as
for all. An extent goes, with its memory, when every group is done with all of its rows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from relax_actor.ids import Holder
from relax_actor.row_queue.records import Column, Columns, FieldsPut, Ranges, RowPart, RowsPut, ranges
from relax_actor.row_queue.spec import QueueSpec


@dataclass(slots=True)
class Span:
    """A field of some rows of an extent."""

    low: int
    high: int
    column: Column  # of the rows low to high


@dataclass(slots=True)
class Extent:
    """What was put at once."""

    producer: Holder
    seq: int
    first: int
    count: int
    keys: tuple[int, ...]
    group_rows: int
    masks: list[int]  # the fields that each row has, as bits
    spans: dict[str, list[Span]] = field(default_factory=dict)
    settled: dict[str, set[int]] = field(default_factory=dict)  # rows that a group is done with
    open_groups: int = 0  # groups that are not done with all rows

    @property
    def end(self) -> int:
        """One more than the last row."""
        return self.first + self.count

    @property
    def segments(self) -> set[str]:
        """Where its fields lie."""
        return {span.column.segment for spans in self.spans.values() for span in spans}

    def add(self, low: int, high: int, columns: Columns, bits: int) -> None:
        """Add fields of rows."""
        for name, column in columns.items():
            self.spans.setdefault(name, []).append(Span(low, high, column))
        for index in range(low - self.first, high - self.first):
            self.masks[index] |= bits

    def columns(self, low: int, high: int, names: Iterable[str]) -> Iterator[tuple[int, Columns]]:
        """Yield pieces of rows, each by its end, whose fields each lie in one place."""
        while low < high:
            spans = {name: self._span(name, low) for name in names}
            end = min(high, *(span.high for span in spans.values()))
            yield (
                end,
                {name: span.column.part(low - span.low, end - span.low) for name, span in spans.items()},
            )
            low = end

    def events(self) -> Iterator[RowsPut | FieldsPut]:
        """Yield what makes it anew."""
        whole = {
            name: spans[0].column
            for name, spans in self.spans.items()
            if len(spans) == 1 and (spans[0].low, spans[0].high) == (self.first, self.end)
        }
        yield RowsPut(self.producer, self.seq, self.first, self.count, whole, self.keys, self.group_rows)
        for name, spans in self.spans.items():
            if name not in whole:
                for span in spans:
                    yield FieldsPut(self.producer, 0, [(span.low, span.high)], {name: span.column})

    def _span(self, name: str, row: int) -> Span:
        return next(span for span in self.spans[name] if span.low <= row < span.high)


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
        self._needed: dict[int, int] = {}  # rows by group key that will ever be ready
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
        self.extend(extent, extent.first, extent.end, event.columns)
        return extent

    def extend(self, extent: Extent, low: int, high: int, columns: Columns) -> None:
        """Take further fields of rows of an extent."""
        before = extent.segments
        extent.add(low, high, columns, self._spec.mask(tuple(columns)))
        for segment in extent.segments - before:
            self._users[segment] = self._users.get(segment, 0) + 1

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
        names = tuple(names)
        found: list[RowPart] = []
        for extent, low, high in self.of(rows):
            for end, columns in extent.columns(low, high, names):
                found.append(RowPart(low, end - low, columns))
                low = end  # noqa: PLW2901 - where the next piece begins
        return found

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

    def take_freed(self) -> list[str]:
        """Return the segments that nobody needs any more since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def _remove(self, extent: Extent) -> None:
        del self._extents[extent.first]
        self._starts.pop(bisect_right(self._starts, extent.first) - 1)
        self.count -= extent.count
        for segment in extent.segments:
            self._users[segment] -= 1
            if not self._users[segment]:
                del self._users[segment]
                self._freed.append(segment)
