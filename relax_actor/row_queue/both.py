"""One text for both ways to wait: a step says what it waits for, and either blocks or awaits it."""

import asyncio
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

R = TypeVar("R")


class Pause(NamedTuple):
    """What there is to wait for: a reply, by whatever end, for so long; without one, the time."""

    reply: Future[Any] | None = None
    timeout_s: float | None = None

    def block(self) -> None:
        """Wait in synchronous code."""
        if self.reply is None:
            time.sleep(self.timeout_s or 0.0)
        elif not self.reply.done():
            with suppress(TimeoutError):
                self.reply.exception(self.timeout_s)

    async def wait(self) -> None:
        """Wait in asynchronous code."""
        if self.reply is None:
            await asyncio.sleep(self.timeout_s or 0.0)
        elif not self.reply.done():
            # Not the reply itself: giving up waiting for it must not cancel it.
            await asyncio.wait([asyncio.ensure_future(_ended(self.reply))], timeout=self.timeout_s)


Steps = Generator[Pause, None, R]
"""What has to be done, up to a result."""


def blocking(steps: Steps[R]) -> R:
    """Do it in synchronous code."""
    while True:
        try:
            pause = next(steps)
        except StopIteration as end:
            found: R = end.value
            return found
        pause.block()


async def awaiting(steps: Steps[R]) -> R:
    """Do it in asynchronous code."""
    while True:
        try:
            pause = next(steps)
        except StopIteration as end:
            found: R = end.value
            return found
        await pause.wait()


async def _ended(reply: Future[Any]) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    reply.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    await ended.wait()
