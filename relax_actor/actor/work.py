"""The part of a status page that says what an actor's main thread is at, and for how long it may be.

The actor writes it with plain stores before it does what may hang; its node agent looks at it (`node.hangs`).
Nothing has to leave the process for a hang to be seen, so it does not matter how it hangs: stopped, with the
GIL, or so early that a message about it would not have been sent yet.

Invariants
- A verdict rests on times, each a word of its own: no stop tears a store of one. What stands beside a time is
  for people, and is written before it.
- Silence is never held against an actor: only a limit that it has written down itself, or to be busy.
"""

import math
import struct
from collections.abc import Mapping
from typing import Final

import msgspec

WORK_AT: Final = 2560
"""Where in the page it begins."""

TEXT_BYTES: Final = 64

_TIMES = struct.Struct("4d")  # native, so that each is one store: limit's end, limit, busy since, moved at
_LIMIT_END, _LIMIT, _BUSY, _MOVED = range(WORK_AT // 8, WORK_AT // 8 + 4)
_METHOD_AT: Final = WORK_AT + _TIMES.size
_DOING_AT: Final = _METHOD_AT + TEXT_BYTES


class Limit(msgspec.Struct, frozen=True, order=True):
    """A method under way that may not run for ever; the first to be over is the least."""

    ends_s: float
    limit_s: float
    method: str


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a page says of the work; times are CLOCK_MONOTONIC seconds of the host."""

    limit: Limit | None = None
    """The one that is over first."""
    busy_since_s: float = 0.0
    """0: the main thread is idle."""
    moved_at_s: float = 0.0
    """When the actor reported progress last."""
    doing: str = ""

    def due(self, hang_after_s: float | None) -> float:
        """Return when the actor hangs, if it writes nothing more; infinity where it never does."""
        return min(self._limit_due, self._busy_due(hang_after_s))

    def why(self, hang_after_s: float | None, now: float, progress: str = "") -> str:
        """Return why it hangs now, or nothing if it does not; `progress` is what it reported last."""
        if self.limit is not None and now >= self._limit_due:
            return f"{self.limit.method} ran longer than its max_runtime_s of {self.limit.limit_s:g} s"
        if now >= self._busy_due(hang_after_s):
            doing = f"{self.doing} ({progress})" if progress else self.doing
            return f"busy with {doing} without progress for {hang_after_s:g} s"
        return ""

    @property
    def _limit_due(self) -> float:
        return self.limit.ends_s if self.limit is not None else math.inf

    def _busy_due(self, hang_after_s: float | None) -> float:
        if hang_after_s is None or not self.busy_since_s:
            return math.inf
        return max(self.busy_since_s, self.moved_at_s) + hang_after_s


class WorkWriter:
    """The actor's own end. Main thread, but for `moved`.

    Args:
        memory: the page.
    """

    def __init__(self, memory: memoryview) -> None:
        self._texts: dict[str, bytes] = {}
        self.use(memory)

    def use(self, memory: memoryview) -> None:
        """Write there from now on."""
        self._memory, self._times = memory, memory.cast("d")

    def limit(self, limits: Mapping[int, Limit]) -> None:
        """Say which of the methods under way is to be over first."""
        first = min(limits.values(), default=None)
        if first is None:
            self._times[_LIMIT_END] = 0.0
        else:
            self._write(_METHOD_AT, first.method)
            self._times[_LIMIT] = first.limit_s
            self._times[_LIMIT_END] = first.ends_s

    def busy(self, doing: str, now: float) -> None:
        """Say that the main thread does something until it is `idle`."""
        self._write(_DOING_AT, doing)
        self._times[_BUSY] = now

    def idle(self) -> None:
        """Say that this is over."""
        self._times[_BUSY] = 0.0

    def moved(self, now: float) -> None:
        """Say that the work goes on; any thread."""
        self._times[_MOVED] = now

    def _write(self, at: int, text: str) -> None:
        self._memory[at : at + TEXT_BYTES] = self._texts.get(text) or self._padded(text)

    def _padded(self, text: str) -> bytes:
        return self._texts.setdefault(text, padded(text, TEXT_BYTES))


def read(memory: memoryview) -> Work:
    """Return what a page says of the work at this moment."""
    ends_s, limit_s, busy_since_s, moved_at_s = _TIMES.unpack_from(memory, WORK_AT)
    return Work(
        limit=Limit(ends_s, limit_s, _text(memory, _METHOD_AT)) if ends_s else None,
        busy_since_s=busy_since_s,
        moved_at_s=moved_at_s,
        doing=_text(memory, _DOING_AT) if busy_since_s else "",
    )


def padded(text: str, nbytes: int) -> bytes:
    """Return as much of a text as fits, whole characters only, filled up with zeros."""
    data = text.encode("utf-8", "replace")[:nbytes].decode("utf-8", "ignore").encode()
    return data.ljust(nbytes, b"\0")


def text_of(data: bytes) -> str:
    """Return a text that was `padded`."""
    return data.rstrip(b"\0").decode("utf-8", "replace")


def _text(memory: memoryview, at: int) -> str:
    return text_of(bytes(memory[at : at + TEXT_BYTES]))
