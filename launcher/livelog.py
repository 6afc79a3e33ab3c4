"""What a live view of many logs shows: merged, prefixed, within a limit that is told. Pure."""

from pathlib import Path

from launcher.merging import LineMerger, Shown, Source, said_by
from launcher.wording import clean

NOTE_S = 1.0
"""How long a log is held back before the view says so, and again at most so often."""


class LiveLog:
    """Lines of logs in, lines for people out.

    Args:
        bar: what stands between who said it and what it said.
        limit_bytes_per_s: what each log may show; what is beyond that is counted and left in its file.
            None shows everything.
        window_s: how far apart equal lines of replicas are shown as one.
    """

    def __init__(
        self, *, bar: str = "│", limit_bytes_per_s: float | None = None, window_s: float = 1.0
    ) -> None:
        self._bar, self._limit = bar, limit_bytes_per_s
        self._merger = LineMerger(window_s)
        self._budgets: dict[Source, _Budget] = {}

    def take(self, source: Source, line: str, path: Path, now: float) -> None:
        """Take one line of a log.

        Args:
            source: whose log it is.
            line: without its end.
            path: of the log, named where lines are held back.
            now: monotonic seconds.
        """
        if self._limit is not None:
            budget = self._budgets.setdefault(source, _Budget(path, self._limit, now))
            if not budget.spend(len(line.encode("utf-8", "backslashreplace")) + 1, now):
                return
            self._note(source, budget, now)
        self._merger.take(source, line, now)

    def lines(self, now: float) -> list[str]:
        """Return what is to be shown by now."""
        for source, budget in self._budgets.items():
            if budget.is_overdue(now):
                self._note(source, budget, now)
        return self._worded(self._merger.due(now))

    def flush(self, now: float) -> list[str]:
        """Return everything that waits, the notes on what was held back too."""
        for source, budget in self._budgets.items():
            self._note(source, budget, now)
        return self._worded(self._merger.flush())

    def _note(self, source: Source, budget: "_Budget", now: float) -> None:
        if note := budget.note():
            self._merger.take(source, note, now)

    def _worded(self, shown: list[Shown]) -> list[str]:
        return [f"{said_by(each.sources)} {self._bar} {clean(each.text)}" for each in shown]


class _Budget:
    """What one log may show: a second's worth at once, refilled steadily."""

    def __init__(self, path: Path, limit_bytes_per_s: float, now: float) -> None:
        self._path, self._limit = path, limit_bytes_per_s
        self._left_bytes, self._at = limit_bytes_per_s, now
        self._held_bytes = self._held_lines = 0
        self._held_since = 0.0

    def spend(self, size_bytes: int, now: float) -> bool:
        """Return whether a line may be shown; else it is counted."""
        self._left_bytes = min(self._limit, self._left_bytes + (now - self._at) * self._limit)
        self._at = now
        if self._left_bytes > 0:  # a line longer than the whole budget is shown too, and paid for later
            self._left_bytes -= size_bytes
            return True
        self._held_since = self._held_since if self._held_lines else now
        self._held_bytes += size_bytes
        self._held_lines += 1
        return False

    def is_overdue(self, now: float) -> bool:
        """Whether people should be told by now that something is held back."""
        return self._held_lines > 0 and now - self._held_since >= NOTE_S

    def note(self) -> str:
        """Say what was held back since the last note; empty if nothing was."""
        if not self._held_lines:
            return ""
        text = (
            f"… {self._held_bytes:,} bytes in {self._held_lines:,} lines not shown: they are in {self._path}"
        )
        self._held_bytes = self._held_lines = 0
        return text
