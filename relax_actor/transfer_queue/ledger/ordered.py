"""A set whose smallest member is at hand: a heap that forgets lazily what was taken out."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound="int | tuple[int, int]")


class OrderedSet(Generic[K]):
    """A set of ids; adding, taking out and reading the smallest cost O(log n)."""

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._members: set[K] = set(members)
        self._heap: list[K] = sorted(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrderedSet) and self._members == other._members

    __hash__ = None  # type: ignore[assignment]

    def add(self, member: K) -> None:
        """Put `member` in, if it is not."""
        if member not in self._members:
            self._members.add(member)
            heapq.heappush(self._heap, member)

    def discard(self, member: K) -> None:
        """Take `member` out, if it is in."""
        self._members.discard(member)

    def first(self) -> K | None:
        """Return the smallest member, or None."""
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def smallest(self, count: int) -> list[K]:
        """Return up to `count` members in ascending order."""
        found: list[K] = []
        while len(found) < count and (member := self.first()) is not None:
            found.append(heapq.heappop(self._heap))
            self._members.discard(member)
        for member in found:
            self.add(member)
        return found

    def ascending(self) -> Iterator[K]:
        """Go through the members from the smallest on; nothing may change meanwhile."""
        passed: list[K] = []
        try:
            while (member := self.first()) is not None:
                heapq.heappop(self._heap)
                if not passed or passed[-1] != member:  # the heap may have it twice
                    passed.append(member)
                    yield member
        finally:
            for member in passed:
                heapq.heappush(self._heap, member)
