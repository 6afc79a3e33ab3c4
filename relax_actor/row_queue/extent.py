"""What was put at once: its rows, their fields, and who is done with which of them. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from relax_actor.ids import Holder
from relax_actor.row_queue.records import Column, Columns, FieldsPut, RowsPut


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
            end = min([high, *(span.high for span in spans.values())])
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
