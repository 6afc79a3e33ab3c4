"""Threads of a program that wait for something to become true of its tree."""

import threading
import time
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 1.0
"""How long a wait lasts at most before it is looked again, whatever was told."""


class Changes:
    """Where the tree's thread tells that something changed. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def tell(self) -> None:
        """Have everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the condition holds; False if the time is over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(min(left, LOOK_S) if left is not None else LOOK_S)
        return True
