"""Looks for hung actors when the watchdog says that one may be: the clock of `watchdog`, which has none."""

import asyncio
import time
from collections.abc import Callable

from relax_actor.actor import wire
from relax_actor.supervision.watchdog import Key, Watchdog

LOOK_S = 0.02
"""The least time between two looks."""


class HangWatch:
    """Feeds the watchdog and acts on its verdicts, in the loop thread.

    Args:
        on_hang: told who hangs and why, once each.
    """

    def __init__(self, on_hang: Callable[[Key, str], None]) -> None:
        self._watchdog, self._on_hang, self._next_look = Watchdog(), on_hang, 0.0
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look by the clock of this loop from now on."""
        self._loop = loop

    def watch(self, key: Key, hang_after_s: float | None) -> None:
        """Expect an actor to get something done at least so often while it is busy."""
        self._watchdog.watch(key, hang_after_s)

    def forget(self, key: Key) -> None:
        """Expect nothing more of it."""
        self._watchdog.forget(key)

    def heard(self, record: wire.Began | wire.Ended | wire.Beat) -> None:
        """Take what an actor says of its work."""
        key, now = (record.name, record.incarnation), time.monotonic()
        match record:
            case wire.Began():
                self._watchdog.began(key, record.call, record.method, record.max_runtime_s, now)
            case wire.Ended():
                self._watchdog.ended(key, record.call)
            case wire.Beat():
                self._watchdog.beat(
                    key, is_busy=record.is_busy, done=record.done, doing=record.doing, now=now
                )
        self._look_when_due(now)

    def _look_when_due(self, now: float) -> None:
        """Have one look planned, not later than the first deadline."""
        due = self._watchdog.next_look()
        if due is not None and not now < self._next_look <= due:
            self._next_look = max(due, now + LOOK_S)
            self._loop.call_at(self._loop.time() + self._next_look - now, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        for key, why in self._watchdog.overdue(now):
            self._on_hang(key, why)
        self._look_when_due(now)
