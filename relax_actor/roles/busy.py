"""Work that goes on for long, as spans in the event log: in stretches, so that nobody waits for its end."""

import time

from relax_actor.telemetry import EventLog

SPAN_S = 0.5
"""Work is reported in stretches of at least this."""


class BusySpans:
    """The spans of one kind of work.

    Args:
        name: of the spans.
        events: where they go.
    """

    def __init__(self, name: str, events: EventLog) -> None:
        self._name, self._events = name, events
        self._since: float | None = None

    def begin(self) -> None:
        """Take it that there is work, if there was none."""
        self._since = self._since or time.time()

    def go_on(self) -> None:
        """Report a stretch, if it is long enough."""
        if self._since is not None and time.time() - self._since > SPAN_S:
            self._since = self._report(self._since)

    def end(self) -> None:
        """Report the last stretch: there is no work."""
        if self._since is not None:
            self._report(self._since)
            self._since = None

    def _report(self, since: float) -> float:
        now = time.time()
        self._events.emit("span", name=self._name, start=since, dur_s=now - since)
        return now
