"""Deadlines of many calls, nearly all of which end earlier; pure.

A timer for each call costs more than the call. Deadlines are therefore kept in buckets of `BUCKET_S`: adding
and removing one is a dictionary's, and only the first bucket needs a timer. A deadline is seen up to one
bucket late.
"""

import heapq
import math
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

BUCKET_S: Final = 0.01


class Deadlines(Generic[K]):
    """Keys with a moment each, in monotonic seconds."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[K, None]] = {}
        self._order: list[int] = []  # a heap of the buckets' numbers; emptied ones stay until their moment

    def add(self, key: K, deadline: float) -> bool:
        """Remember a deadline; return whether it is now the first."""
        number = _bucket_of(deadline)
        bucket = self._buckets.get(number)
        if bucket is not None:
            bucket[key] = None
            return False
        self._buckets[number] = {key: None}
        heapq.heappush(self._order, number)
        return self._order[0] == number

    def remove(self, key: K, deadline: float) -> None:
        """Forget a deadline; one that is unknown or passed is fine."""
        if (bucket := self._buckets.get(_bucket_of(deadline))) is not None:
            bucket.pop(key, None)

    def pop_passed(self, now: float) -> list[K]:
        """Return and forget what has passed, earliest bucket first."""
        passed: list[K] = []
        while self._order and self._order[0] * BUCKET_S <= now:
            passed += self._buckets.pop(heapq.heappop(self._order))
        return passed

    def first(self) -> float | None:
        """Return when to look again, or None while nothing waits."""
        while self._order and not self._buckets[self._order[0]]:
            del self._buckets[heapq.heappop(self._order)]
        return self._order[0] * BUCKET_S if self._order else None


def _bucket_of(deadline: float) -> int:
    return math.ceil(deadline / BUCKET_S)
