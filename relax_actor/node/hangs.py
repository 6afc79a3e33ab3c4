"""Looks at the pages of a host's actors for those that hang; see `relax_actor.actor.work`."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from relax_actor.actor import page, work
from transport.segment import Segment

LOOK_S: Final = 0.2
"""How often it is looked. A limit is felt when it is over; one shorter than this, up to so much later."""

LEAST_S: Final = 0.01
"""The least time between two looks."""

Key: TypeAlias = tuple[str, int]
"""Name and incarnation, as an actor was started."""


class _Watched(msgspec.Struct, frozen=True):
    segment: Segment
    hang_after_s: float | None


class HangWatch:
    """The agent's eye on its actors. Every method runs in the loop thread.

    Args:
        loop: by whose clock it is looked.
        on_hang: told who hangs and why, once each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_hang: Callable[[Key, str], object]) -> None:
        self._loop, self._on_hang = loop, on_hang
        self._watched: dict[Key, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, key: Key, segment: Segment, hang_after_s: float | None) -> None:
        """Look at a page from now on.

        Args:
            key: whose it is.
            segment: the page.
            hang_after_s: how long its actor may be busy without progress.
        """
        self._watched[key] = _Watched(segment, hang_after_s)
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def forget(self, key: Key) -> None:
        """Look no more at an actor that is dying, dead, or known to hang."""
        self._watched.pop(key, None)

    def _look(self) -> None:
        now = time.monotonic()
        found = [(key, why) for key, each in self._watched.items() if (why := _why(each, now))]
        for key, why in found:
            self.forget(key)
            self._on_hang(key, why)
        dues = [work.read(each.segment.buf).due(each.hang_after_s) for each in self._watched.values()]
        delay_s = max(min([now + LOOK_S, *dues]) - now, LEAST_S)
        self._timer = self._loop.call_later(delay_s, self._look) if self._watched else None


def _why(watched: _Watched, now: float) -> str:
    """Return why an actor hangs, by a second look: in the first, a limit may have been half written."""
    if work.read(watched.segment.buf).due(watched.hang_after_s) > now:
        return ""
    record = page.read(bytes(watched.segment.buf))
    progress = record.progress if record is not None else ""
    return work.read(watched.segment.buf).why(watched.hang_after_s, now, progress)
