"""Rows for data-parallel ranks, dealt in turns of about as many tokens for each. Pure."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from relax_actor.row_queue.records import Ranges, each, ranges
from relax_actor.row_queue.spec import TokenBudget

Length = Callable[[int], int]
"""The length of a row's counted field."""


class TokensReady:
    """See `sampling`.

    Args:
        sampler: the budget.
        length: of a row.
    """

    def __init__(self, sampler: TokenBudget, length: Length) -> None:
        self._ranks, self._budget, self._length = sampler.ranks, sampler.tokens, length
        self._rows: dict[int, int] = {}  # their tokens, in order
        self._tokens = 0
        self._shares: list[deque[Ranges]] = [deque() for _ in range(sampler.ranks)]

    @property
    def count(self) -> int:
        """How many rows are here, shares included."""
        return len(self._rows) + sum(
            high - low for shares in self._shares for share in shares for low, high in share
        )

    def give(self, rows: Ranges, *, again: bool = False) -> None:
        """Add rows."""
        fresh = {row: self._length(row) for row in each(rows)}
        self._tokens += sum(fresh.values())
        if again:
            self._rows = {**fresh, **self._rows}
        else:
            self._rows.update(fresh)

    def give_back(self, rank: int, share: Ranges) -> None:
        """Let a rank have its share of a turn again."""
        self._shares[rank].appendleft(share)

    def take(self, rows: Ranges) -> None:
        """Remove rows, also out of shares."""
        gone = set(each(rows))
        for row in gone:
            self._tokens -= self._rows.pop(row, 0)
        for shares in self._shares:
            for index, share in enumerate(shares):
                if not gone.isdisjoint(each(share)):
                    shares[index] = ranges(row for row in each(share) if row not in gone)

    def share(self, rank: int) -> Ranges | None:
        """Return the next share of a rank, if there is one."""
        return self._shares[rank][0] if self._shares[rank] else None

    def deal(self, shares: Sequence[Ranges | None]) -> None:
        """Begin a turn."""
        self.take([piece for share in shares for piece in share or ()])
        for rank, share in enumerate(shares):
            if share is not None:
                self._shares[rank].append(share)

    def lend(self, rank: int, rows: Ranges) -> None:
        """Note that a rank has its next share."""
        if self.share(rank) == rows:
            self._shares[rank].popleft()
        else:  # made by a snapshot, where loans come before turns
            self.take(rows)

    def turns(self) -> Iterator[list[Ranges | None]]:
        """Yield the shares that no rank has yet, turn by turn; None for a rank that has had its own."""
        for left in range(max(map(len, self._shares)), 0, -1):
            yield [shares[-left] if left <= len(shares) else None for shares in self._shares]

    def is_on_offer(self, *, is_end: bool) -> bool:
        """Whether some rank would get something."""
        return any(self._shares) or self._is_enough(is_end=is_end)

    def turn(self, *, is_end: bool) -> list[Ranges] | None:
        """Return the next turn's shares: the longest row first, each to the rank with the fewest tokens.

        None while there are fewer tokens than ranks have room for, unless no more will come.
        """
        if not self._is_enough(is_end=is_end):
            return None
        chosen: list[tuple[int, int]] = []
        total = 0
        for row, length in self._rows.items():
            if total >= self._budget * self._ranks:
                break
            chosen.append((length, row))
            total += length
        return self._dealt(chosen)

    def _is_enough(self, *, is_end: bool) -> bool:
        return bool(self._rows) and (is_end or self._tokens >= self._budget * self._ranks)

    def _dealt(self, rows: list[tuple[int, int]]) -> list[Ranges]:
        """Deal rows in a fixed order; who has waited longest comes first, so that no row waits for ever."""
        shares: list[list[int]] = [[] for _ in range(self._ranks)]
        tokens = [0] * self._ranks
        for length, row in [rows[0], *sorted(rows[1:], key=lambda item: (-item[0], item[1]))]:
            rank = min(range(self._ranks), key=lambda rank: (tokens[rank], rank))
            if tokens[rank] and tokens[rank] + length > self._budget:
                continue  # it waits for the next turn
            shares[rank].append(row)
            tokens[rank] += length
        return [ranges(sorted(share)) for share in shares]
