"""A thread with an event loop, which other threads hand actions to."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any


class IoThread:
    """What has its own time in a process: timers, and the sockets while nobody else reads them.

    Args:
        opens: awaited first; what it raises is raised by `start`.
        closes: called last.
    """

    def __init__(self, opens: Callable[[], Awaitable[None]], closes: Callable[[], None]) -> None:
        self._opens, self._closes = opens, closes
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._actions: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._drain_is_due = False
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        """Start the thread and return once it has opened what it owns."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread, which closes what it owns."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def run_soon(self, action: Callable[..., object], *args: Any) -> None:
        """Run `action` in this thread, in the order of the calls; a stopped thread drops it.

        The loop is woken once for all that is handed over before it looks.
        """
        self._actions.append((action, args))
        if not self._drain_is_due:
            self._drain_is_due = True
            self.wake(self._drain)

    def wake(self, action: Callable[[], object]) -> None:
        """Run `action` in this thread; takes no lock of ours, so a finalizer may call it at any moment."""
        try:
            self.loop.call_soon_threadsafe(action)
        except (RuntimeError, AttributeError):  # closed, or not yet there: the process ends or begins
            return

    def _drain(self) -> None:
        self._drain_is_due = False  # before looking: what comes after this wakes the loop again
        for _ in range(len(self._actions)):
            action, args = self._actions.popleft()
            try:
                action(*args)
            except Exception as error:  # noqa: BLE001 - one message's failure is not the thread's
                self.loop.call_exception_handler({"message": f"{action!r} failed", "exception": error})

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            try:
                runner.run(self._open())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that called start
                self._failure = error
                return
            finally:
                self._started.set()
            try:
                self.loop.run_forever()
            finally:
                self._closes()

    async def _open(self) -> None:
        await self._opens()
