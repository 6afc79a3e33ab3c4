"""ZeroMQ sockets that several threads use in turn, and that whichever of them waits anyway may read.

A ZeroMQ socket may be used by one thread at a time, and passing it on takes a full memory fence: a lock is
one. So every use of the sockets (send, connect, close, `read`) happens with `lock` held; waiting does not.

The hub stands where an event loop stands for `zmq_pump.Pump`: it watches descriptors, but calls nobody by
itself. Its own descriptor becomes readable when there is something to do, for any number of threads to wait
for; whoever wakes calls `read`. Who waits often has an epoll of its own that mirrors the hub's: an epoll in
an epoll is dearer, and what the wait found need not be asked for again.

Any use of a socket may consume the edge of its descriptor, and to look whether it did costs more than a
small send. So a socket stays in doubt while nobody waits: who is about to wait says so by `rest`, which looks
at every socket in doubt. While anybody rests, a socket is looked at immediately. Who waits for the descriptor
without a `rest` may wait for ever.
"""

import asyncio
import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

_log = logging.getLogger(__name__)

_READABLE: Final = select.EPOLLIN

CATCH_UP_READS: Final = 64
"""After so many a flood that was caught up with has to wait for its turn like any other."""

Ready: TypeAlias = Sequence[tuple[int, int]]
"""What an epoll found: descriptors and events."""


class Hub:
    """The sockets of one process.

    Attributes:
        lock: held by whoever uses a socket.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._epoll = select.epoll()
        self._kicker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._kicker, _READABLE)
        self._mirrors: list[select.epoll] = []
        self._readers: dict[int, Callable[[], object]] = {self._kicker: self._kicked}
        self._turns: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._resting: set[int] = set()  # threads
        self._doubts: list[Callable[[], object]] = []
        self._is_kicked = self._is_reading = self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `read`."""
        return self._epoll.fileno()

    def mirror(self, epoll: select.epoll) -> None:
        """Have another epoll find whatever makes the hub's descriptor readable, while both are open."""
        with self.lock:
            self._mirrors.append(epoll)
            for descriptor in self._readers:
                epoll.register(descriptor, _READABLE)

    def rest(self) -> bool:
        """Say that this thread waits for the descriptor from now on; False where it shall `read` instead."""
        with self.lock:
            self._resting.add(threading.get_ident())
            if self._doubts:
                self._look()
            return not self._turns

    def wake(self) -> None:
        """Say that this thread does not wait any more."""
        self._resting.discard(threading.get_ident())

    def read(self, ready: Ready | None = None) -> None:
        """Let every socket that has messages deliver them; never waits for more.

        Args:
            ready: what a mirror found just now; none has the hub look itself.
        """
        with self.lock:
            if self._is_closed:
                return
            self._is_reading = True
            try:
                for descriptor, _ in self._epoll.poll(0) if ready is None else ready:
                    if (reader := self._readers.get(descriptor)) is not None:
                        reader()
                if self._turns:
                    self._take_turns()
            finally:
                self._is_reading = False

    def catch_up(self) -> None:
        """Let every socket deliver what has arrived, unless it is a flood; not from inside of a `read`."""
        with self.lock:
            if self._is_closed:
                return
            self._look()
            for _ in range(CATCH_UP_READS):
                self.read()
                if not self._turns:
                    return

    def close(self) -> None:
        """Close the descriptors, after the sockets; the second time does nothing."""
        with self.lock:
            if not self._is_closed:
                self._is_closed = True
                self._mirrors.clear()
                self._epoll.close()
                os.close(self._kicker)

    # -- what a pump needs of an event loop; with the lock held -----------------------------------

    def add_reader(self, descriptor: int, callback: Callable[[], object], /) -> None:
        """Call back from `read` when the descriptor is readable."""
        self._readers[descriptor] = callback
        for epoll in (self._epoll, *self._mirrors):
            epoll.register(descriptor, _READABLE)

    def remove_reader(self, descriptor: int, /) -> bool:
        """Stop watching a descriptor."""
        for epoll in (self._epoll, *self._mirrors):
            epoll.unregister(descriptor)
        return self._readers.pop(descriptor, None) is not None

    def call_soon(self, callback: Callable[..., object], /, *args: Any) -> None:
        """Call back from this `read`, or from the next, which will be soon."""
        self._turns.append((callback, args))
        if not self._is_reading:
            self._kick()

    def look_later(self, look: Callable[[], object], /) -> bool:
        """Have a socket looked at before anybody waits; False where somebody waits, so that it is due now."""
        if self._resting:
            return False
        self._doubts.append(look)
        return True

    def is_closed(self) -> bool:
        """Whether nothing is watched any more."""
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any], /) -> None:
        """Report what a callback raised."""
        _log.error(context["message"], exc_info=context["exception"])

    # -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        doubts, self._doubts = self._doubts, []
        self._is_reading = True  # who looks will read: nobody needs to be woken for it
        try:
            for look in doubts:
                look()
        finally:
            self._is_reading = False

    def _take_turns(self) -> None:
        for _ in range(len(self._turns)):
            callback, args = self._turns.popleft()
            callback(*args)
        if self._turns:  # a flood: others have their turn first
            self._kick()

    def _kick(self) -> None:
        if not self._is_kicked:
            self._is_kicked = True
            os.eventfd_write(self._kicker, 1)

    def _kicked(self) -> None:
        self._is_kicked = False
        with contextlib.suppress(BlockingIOError):  # another thread that was woken by it was quicker
            os.eventfd_read(self._kicker)


Watcher = asyncio.AbstractEventLoop | Hub
"""Who reads a socket."""
