"""One thread an actor that waits in the kernel for its death notice; see `relax_actor.actor.robust`.

The thread never forks and never touches a socket of ZeroMQ: it waits for a mutex with the interpreter lock
released, says the news early (see `early`) and hands it to the agent's loop. Its cost is a stack that is
hardly touched.
"""

import threading
from collections.abc import Callable

from relax_actor.actor import page
from transport.segment import Segment

STACK_BYTES = 256 * 1024


class DeathWatch:
    """Waits for the death of the thread that holds a page's mutex.

    Args:
        segment: the actor's page.
    """

    def __init__(self, segment: Segment) -> None:
        self._mutex, self._held = page.mutex(segment), page.held(segment)

    def start(self, on_death: Callable[[], object]) -> None:
        """Begin to wait.

        Args:
            on_death: called from the watch's own thread, once, if the holder died holding it.
        """
        thread = threading.Thread(target=self._wait, args=(on_death,), name="death watch", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)

    def end(self) -> None:
        """End the wait for an actor that is known to be dead, though it may never have held the mutex."""
        self._held.post()

    def _wait(self, on_death: Callable[[], object]) -> None:
        self._held.wait()
        if self._mutex.lock():
            on_death()
        self._mutex.unlock()
