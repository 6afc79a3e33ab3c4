"""Which ready rows a consumer gets next: one class a sampler, all pure.

Each keeps the rows that are ready for its group and not lent. `offer`, or `share` and `turn`, say what a
consumer would get and change nothing; `take` removes rows, wherever they are; `give` adds them, those that
came back in front.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

from relax_actor.row_queue.records import Ranges, ranges
from relax_actor.row_queue.spec import ConsumerGroup, Fifo, TokenBudget, WholeGroups

Length = Callable[[int], int]
"""The length of a row's counted field."""


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
        self._wanted: dict[int, int] = {}  # rows of a group that will ever be ready, where some are gone
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
            self._wanted[key] = self._wanted.get(key, wanted) - 1
            self._look(key, wanted)
            if self._wanted[key] <= 0:
                del self._wanted[key]

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
        if members and len(members) >= self._wanted.get(key, wanted):
            self._whole.setdefault(key)


class TokensReady:
    """Rows for ranks, dealt in turns.

    Args:
        sampler: the budget.
        length: of a row.
    """

    def __init__(self, sampler: TokenBudget, length: Length) -> None:
        self._sampler, self._length = sampler, length
        self._rows: dict[int, None] = {}  # in order
        self._shares: list[deque[Ranges]] = [deque() for _ in range(sampler.ranks)]

    @property
    def count(self) -> int:
        """How many rows are here, shares included."""
        return len(self._rows) + sum(
            high - low for shares in self._shares for share in shares for low, high in share
        )

    def give(self, rows: Ranges, *, again: bool = False) -> None:
        """Add rows."""
        fresh = dict.fromkeys(each(rows))
        self._rows = {**fresh, **self._rows} if again else {**self._rows, **fresh}

    def give_back(self, rank: int, share: Ranges) -> None:
        """Let a rank have its share of a turn again."""
        self._shares[rank].appendleft(share)

    def take(self, rows: Ranges) -> None:
        """Remove rows, also out of shares."""
        gone = set(each(rows))
        for row in gone & self._rows.keys():
            del self._rows[row]
        for shares in self._shares:
            for index, share in enumerate(shares):
                if gone.intersection(each(share)):
                    shares[index] = ranges(row for row in each(share) if row not in gone)

    def share(self, rank: int) -> Ranges | None:
        """Return the next share of a rank, if there is one."""
        return self._shares[rank][0] if self._shares[rank] else None

    def deal(self, shares: list[Ranges]) -> None:
        """Begin a turn."""
        self.take([piece for share in shares for piece in share])
        for rank, share in enumerate(shares):
            self._shares[rank].append(share)

    def lend(self, rank: int, rows: Ranges) -> None:
        """Note that a rank has its next share."""
        if self.share(rank) == rows:
            self._shares[rank].popleft()
        else:  # made by a snapshot
            self.take(rows)

    def turns(self) -> list[list[Ranges]]:
        """Return the shares that no rank has yet, turn by turn."""
        longest = max(map(len, self._shares))
        return [
            [shares[turn] if turn < len(shares) else [] for shares in self._shares] for turn in range(longest)
        ]

    def turn(self, *, is_end: bool) -> list[Ranges] | None:
        """Return the next turn's shares: the longest row first, each to the rank with the fewest tokens.

        None while there are fewer tokens than ranks have room for, unless no more will come.
        """
        budget, ranks = self._sampler.tokens, self._sampler.ranks
        chosen: list[tuple[int, int]] = []
        total = 0
        for row in self._rows:
            if total >= budget * ranks:
                break
            chosen.append((self._length(row), row))
            total += chosen[-1][0]
        if not chosen or (total < budget * ranks and not is_end):
            return None
        return _dealt(chosen, ranks, budget)


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


def each(rows: Ranges) -> Iterator[int]:
    """Yield the rows of ranges."""
    for low, high in rows:
        yield from range(low, high)


def _dealt(rows: Iterable[tuple[int, int]], ranks: int, budget: int) -> list[Ranges]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for length, row in sorted(rows, key=lambda item: (-item[0], item[1])):
        rank = min(range(ranks), key=lambda rank: (tokens[rank], rank))
        if tokens[rank] and tokens[rank] + length > budget:
            continue  # it waits for the next turn
        shares[rank].append(row)
        tokens[rank] += length
    return [ranges(sorted(share)) for share in shares]
