"""How many sessions to other hosts are on their way at once. Pure."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class Gate(Generic[S]):
    """Lets in so many at a time, in the order in which they came.

    Args:
        width: how many; at least one.
        let_in: called for each when its turn comes.
    """

    def __init__(self, width: int, let_in: Callable[[S], None]) -> None:
        self._width, self._let_in = max(1, width), let_in
        self._inside: set[S] = set()
        self._waiting: deque[S] = deque()

    def enter(self, who: S) -> None:
        """Let somebody in, now or when there is room."""
        self._waiting.append(who)
        self._fill()

    def leave(self, who: S) -> None:
        """Make room; who is not inside is none."""
        self._inside.discard(who)
        self._fill()

    def close(self) -> None:
        """Let nobody in any more."""
        self._waiting.clear()

    def _fill(self) -> None:
        while self._waiting and len(self._inside) < self._width:
            who = self._waiting.popleft()
            self._inside.add(who)
            self._let_in(who)
