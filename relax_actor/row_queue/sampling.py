"""Which ready rows a consumer gets next: one class a sampler, all pure.

Each keeps the rows that are ready for its group and not lent. `offer`, or `share` and `turn`, say what a
consumer would get and change nothing; `take` removes rows, wherever they are; `give` adds them, those that
came back in front.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from relax_actor.row_queue.records import Ranges, each, ranges
from relax_actor.row_queue.spec import ConsumerGroup, Fifo, WholeGroups
from relax_actor.row_queue.turns import Length, TokensReady


class FifoReady:
    """Rows in order, as ranges: a range costs as much as a row."""

    def __init__(self) -> None:
        self._ranges: deque[tuple[int, int]] = deque()
        self.count = 0

    def give(self, rows: Ranges, *, again: bool = False) -> None:
        """Add rows."""
        for low, high in rows:
            self.count += high - low
        if again:
            self._ranges.extendleft(reversed(rows))
        elif self._ranges and rows and self._ranges[-1][1] == rows[0][0]:
            self._ranges[-1] = (self._ranges[-1][0], rows[0][1])
            self._ranges.extend(rows[1:])
        else:
            self._ranges.extend(rows)

    def take(self, rows: Ranges) -> None:
        """Remove rows: quick where they are the first."""
        for low, high in rows:
            if self._ranges and self._ranges[0][0] == low and self._ranges[0][1] >= high:
                first = self._ranges.popleft()
                if first[1] > high:
                    self._ranges.appendleft((high, first[1]))
                self.count -= high - low
            else:
                self._cut(low, high)

    def offer(self, max_rows: int) -> Ranges:
        """Return the first rows, in ascending order."""
        found: Ranges = []
        for low, high in self._ranges:
            if max_rows <= 0:
                break
            found.append((low, min(high, low + max_rows)))
            max_rows -= high - low
        return sorted(found)

    def is_on_offer(self, *, is_end: bool) -> bool:  # noqa: ARG002 - as of the other samplers
        """Whether somebody would get something."""
        return bool(self.count)

    def _cut(self, low: int, high: int) -> None:
        kept: deque[tuple[int, int]] = deque()
        for start, end in self._ranges:
            if end <= low or start >= high:
                kept.append((start, end))
                continue
            self.count -= min(end, high) - max(start, low)
            kept.extend(piece for piece in ((start, low), (high, end)) if piece[0] < piece[1])
        self._ranges = kept


class GroupsReady:
    """Whole groups, in the order in which they became whole.

    Args:
        group_of: the group of a row, and how many rows that will have.
    """

    def __init__(self, group_of: Callable[[int], tuple[int, int]]) -> None:
        self._group_of = group_of
        self._rows: dict[int, set[int]] = {}  # by group
        self.wanted: dict[int, int] = {}  # rows of a group that will ever be ready, where some are gone
        self._whole: OrderedDict[int, None] = OrderedDict()
        self.count = 0

    def give(self, rows: Ranges, *, again: bool = False) -> None:
        """Add rows; a group that came back is dealt first."""
        for row in each(rows):
            key, wanted = self._group_of(row)
            self._rows.setdefault(key, set()).add(row)
            self.count += 1
            self._look(key, wanted)
            if again and key in self._whole:
                self._whole.move_to_end(key, last=False)

    def take(self, rows: Ranges) -> None:
        """Remove rows."""
        for row in each(rows):
            key, _ = self._group_of(row)
            members = self._rows.get(key)
            if members is None or row not in members:
                continue
            members.discard(row)
            self.count -= 1
            if not members:
                del self._rows[key]
                self._whole.pop(key, None)

    def lessen(self, rows: Ranges) -> None:
        """Do not wait for rows any more: their groups are whole without them."""
        for row in each(rows):
            key, wanted = self._group_of(row)
            self.wanted[key] = self.wanted.get(key, wanted) - 1
            self._look(key, wanted)
            if self.wanted[key] <= 0:
                del self.wanted[key]

    def finish(self, keys: Iterable[int]) -> None:
        """Forget groups that a consumer is done with."""
        for key in keys:
            if key not in self._rows:
                self.wanted.pop(key, None)

    def restore(self, wanted: dict[int, int]) -> None:
        """Take over how many rows the groups have that have lost some."""
        self.wanted = dict(wanted)
        for key, rows in wanted.items():
            self._look(key, rows)

    def is_on_offer(self, *, is_end: bool) -> bool:  # noqa: ARG002 - as of the other samplers
        """Whether somebody would get something."""
        return bool(self._whole)

    def offer(self, max_rows: int) -> Ranges:
        """Return whole groups, at least one of them if there is one, in ascending order."""
        found: list[int] = []
        for key in self._whole:
            members = self._rows[key]
            if found and len(found) + len(members) > max_rows:
                break
            found += members
        return ranges(sorted(found))

    def _look(self, key: int, wanted: int) -> None:
        """See whether a group is whole now."""
        members = self._rows.get(key)
        if members and len(members) >= self.wanted.get(key, wanted):
            self._whole.setdefault(key)


def make_ready(
    group: ConsumerGroup, length: Length, group_of: Callable[[int], tuple[int, int]]
) -> FifoReady | GroupsReady | TokensReady:
    """Return the rows of a group by its sampler."""
    sampler = group.sampler
    if isinstance(sampler, Fifo):
        return FifoReady()
    if isinstance(sampler, WholeGroups):
        return GroupsReady(group_of)
    return TokensReady(sampler, length)
