"""What is done later in a courier's loop, and not at all once it is closed."""

import asyncio
from collections.abc import Callable


class Timers:
    """Timers of one owner.

    Args:
        loop: that they run in; every method is called in its thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: set[asyncio.TimerHandle] = set()

    def later(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        """Call `action` after so many seconds."""

        def run() -> None:
            self._pending.discard(timer)
            action(*args)

        timer = self._loop.call_later(delay_s, run)
        self._pending.add(timer)

    def close(self) -> None:
        """Call nothing any more that is pending."""
        for timer in self._pending:
            timer.cancel()
        self._pending.clear()
