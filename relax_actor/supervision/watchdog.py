"""Who hangs: a method over its `max_runtime_s`, or an actor that is busy and gets nothing done.

Pure: facts and times in, verdicts out. An actor's I/O thread tells when a limited method begins and ends,
and, a few times in `hang_after_s`, whether its main thread is busy and how much it has done so far. Silence
alone is never held against an actor: a thread that holds the GIL silences it without hanging.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

Key: TypeAlias = tuple[str, int]
"""Name and incarnation."""


@dataclass(frozen=True, kw_only=True)
class _Limited:
    method: str
    limit_s: float
    since: float


@dataclass(kw_only=True)
class _Watched:
    limited: dict[str, _Limited] = field(default_factory=dict)  # call to what it runs
    hang_after_s: float | None = None
    is_busy: bool = False
    done: int = -1  # messages, steps and reports of progress so far
    doing: str = ""
    moved_at: float = 0.0  # when `done` grew, or it became busy


class Watchdog:
    """What is known of the work of every actor that may hang. Times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._watched: dict[Key, _Watched] = {}

    def watch(self, key: Key, hang_after_s: float | None) -> None:
        """Expect an actor to get something done at least so often while it is busy."""
        self._watched[key] = _Watched(hang_after_s=hang_after_s)

    def forget(self, key: Key) -> None:
        """Expect nothing more of it."""
        self._watched.pop(key, None)

    def began(self, key: Key, call: str, method: str, limit_s: float, now: float) -> None:
        """Note that a method with a limit runs."""
        if (watched := self._watched.get(key)) is not None:
            watched.limited[call] = _Limited(method=method, limit_s=limit_s, since=now)

    def ended(self, key: Key, call: str) -> None:
        """Note that it is over."""
        if (watched := self._watched.get(key)) is not None:
            watched.limited.pop(call, None)

    def beat(self, key: Key, *, is_busy: bool, done: int, doing: str, now: float) -> None:
        """Note whether its main thread is busy, with what, and how much it has done so far."""
        watched = self._watched.get(key)
        if watched is None:
            return
        if done != watched.done or not watched.is_busy:
            watched.moved_at = now
        watched.is_busy, watched.done, watched.doing = is_busy, done, doing

    def overdue(self, now: float) -> list[tuple[Key, str]]:
        """Return who hangs and why, and forget them."""
        found = [(key, why) for key, watched in self._watched.items() if (why := _why(watched, now))]
        for key, _ in found:
            self.forget(key)
        return found

    def next_look(self) -> float | None:
        """Return when somebody may be found to hang, if nothing more is heard."""
        times = [at for watched in self._watched.values() for at in _deadlines(watched)]
        return min(times, default=None)


def _deadlines(watched: _Watched) -> list[float]:
    times = [each.since + each.limit_s for each in watched.limited.values()]
    if watched.is_busy and watched.hang_after_s is not None:
        times.append(watched.moved_at + watched.hang_after_s)
    return times


def _why(watched: _Watched, now: float) -> str:
    for each in watched.limited.values():
        if now >= each.since + each.limit_s:
            return f"{each.method} ran longer than its max_runtime_s of {each.limit_s:g} s"
    after_s = watched.hang_after_s
    if watched.is_busy and after_s is not None and now >= watched.moved_at + after_s:
        return f"busy with {watched.doing} without progress for {after_s:g} s"
    return ""
