"""Merges the lines of many logs into one view: identical lines of several replicas are shown once.

Promises, each of them a test:
- No line is lost or made up, and the lines of one log keep their order.
- A line stands for several logs only where they are replicas of one role at one incarnation, their text is
  the same, and they came within `window_s` of one another; it names exactly those.
- A line waits at most `window_s` for its like.

A line is held back until its window is over; then it leaves together with the first equal line of each
other replica, and what stands before that one in its log leaves first, so that no order is broken. Two logs
that have two lines in opposite order cannot have both merged; then the one that is older is.

Pure: time is handed in.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

_DEEPEST = 64
"""How many logs may wait for one another's lines in one release; beyond that lines stay unmerged."""


class Source(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The log of one incarnation of one actor."""

    role: str
    replica: int  # -1 for an actor that has no number
    incarnation: int

    def __str__(self) -> str:
        return said_by((self,))


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the view."""

    sources: tuple[Source, ...]  # sorted, at least one
    text: str


class LineMerger:
    """Takes lines as they come and gives them out merged.

    Args:
        window_s: how far apart equal lines may come; 0 merges nothing but what comes at the same moment.
    """

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._queues: dict[Source, _Queue] = {}
        self._peers: defaultdict[tuple[str, int], list[Source]] = defaultdict(list)
        self._order: deque[tuple[float, Source, int]] = deque()  # arrivals, by time
        self._out: list[Shown] = []

    def take(self, source: Source, text: str, now: float) -> None:
        """Take one line; `now` never goes back."""
        queue = self._queues.get(source)
        if queue is None:
            queue = self._queues[source] = _Queue()
            self._peers[source.role, source.incarnation].append(source)
        self._order.append((now, source, queue.push(text, now)))

    def due(self, now: float) -> list[Shown]:
        """Return the lines whose window is over, and those that must come before them."""
        return self._until(now - self._window_s)

    def flush(self) -> list[Shown]:
        """Return everything that waits."""
        return self._until(float("inf"))

    def _until(self, moment: float) -> list[Shown]:
        while self._order and self._order[0][0] <= moment:
            _, source, number = self._order.popleft()
            while self._queues[source].first <= number:  # else it left with another
                self._release(source, frozenset())
        out, self._out = self._out, []
        return out

    def _release(self, source: Source, held: frozenset[Source]) -> None:
        """Let the first line of a log go, with its like; the first lines of `held` must stay."""
        text, at = self._queues[source].head
        together = [source]
        for peer in self._peers_of(source):
            queue = self._queues[peer]
            number = queue.find(text)
            if peer in held or number is None or abs(queue.at(number) - at) > self._window_s:
                continue
            if queue.first < number and len(held) >= _DEEPEST:
                continue
            while queue.first < number:
                self._release(peer, held.union(together))
            together.append(peer)
        for each in together:
            self._queues[each].pop()
        self._out.append(Shown(sources=tuple(sorted(together)), text=text))

    def _peers_of(self, source: Source) -> Iterator[Source]:
        if source.replica >= 0:
            yield from (each for each in self._peers[source.role, source.incarnation] if each != source)


class _Queue:
    """The waiting lines of one log, numbered for ever, and where each text stands first."""

    def __init__(self) -> None:
        self.first = 0  # the number of the line at the head
        self._lines: deque[tuple[str, float]] = deque()
        self._numbers: dict[str, deque[int]] = {}

    @property
    def head(self) -> tuple[str, float]:
        """The first line and when it came."""
        return self._lines[0]

    def push(self, text: str, now: float) -> int:
        """Append a line; return its number."""
        number = self.first + len(self._lines)
        self._lines.append((text, now))
        self._numbers.setdefault(text, deque()).append(number)
        return number

    def pop(self) -> None:
        """Take the first line away."""
        text, _ = self._lines.popleft()
        self.first += 1
        numbers = self._numbers[text]
        numbers.popleft()
        if not numbers:
            del self._numbers[text]

    def find(self, text: str) -> int | None:
        """Return the number of the first line of that text."""
        numbers = self._numbers.get(text)
        return numbers[0] if numbers else None

    def at(self, number: int) -> float:
        """Return when a waiting line came."""
        return self._lines[number - self.first][1]


def said_by(sources: Sequence[Source]) -> str:
    """Return the name of one log, or of several replicas: `rollout/{0-3,5}#1`."""
    first = sources[0]
    if first.replica < 0:
        return f"{first.role}#{first.incarnation}"
    numbers = [source.replica for source in sources]
    replicas = str(numbers[0]) if len(numbers) == 1 else f"{{{','.join(_ranges(numbers))}}}"
    return f"{first.role}/{replicas}#{first.incarnation}"


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
