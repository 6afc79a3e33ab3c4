"""Where callers wait for what is not there yet, without a task of theirs waking up for nothing.

A caller says how to look for what it wants. Whenever something changed all of them are looked for at once, in
the order they came; only who has found something is woken.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

Look = Callable[[], Any]
"""Returns what was found, or None; what it raises is the caller's answer."""

Found = list[tuple["asyncio.Future[Any]", Any]]
"""Who has found what: a value, or an exception."""


class Parking:
    """Callers who wait."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[Any], Look] = {}

    async def until(self, look: Callable[[], R | None], wait_s: float) -> R | None:
        """Return what `look` finds, now or within `wait_s`; None where it finds nothing."""
        found = look()
        if found is not None or wait_s <= 0:
            return found
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R | None] = loop.create_future()
        self._waiting[future] = look
        timer = loop.call_later(wait_s, _settle, future, None)
        try:
            return await future
        finally:
            timer.cancel()
            del self._waiting[future]

    def look(self) -> Found:
        """Look for everybody; who has found something is to be told by `tell`."""
        found: Found = []
        for future, look in self._waiting.items():
            if future.done():
                continue
            try:
                value = look()
            except Exception as error:  # noqa: BLE001 - it is the caller's
                value = error
            if value is not None:
                found.append((future, value))
        return found

    def tell(self, found: Found) -> None:
        """Wake those who have found something."""
        for future, value in found:
            _settle(future, value)


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
