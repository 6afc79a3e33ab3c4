"""Time as a value that can be handed in, so that deadlines are tested without waiting."""

import time
from typing import Protocol


class Clock(Protocol):
    """Whatever can tell monotonic seconds."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The machine's CLOCK_MONOTONIC, shared by all processes of one host."""

    def monotonic(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()


class BootClock:
    """The machine's CLOCK_BOOTTIME, which also counts the time the machine was suspended."""

    def monotonic(self) -> float:
        """Return CLOCK_BOOTTIME in seconds."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        """Return the seconds this clock was moved to."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`.

        Raises:
            ValueError: `seconds` is negative; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
