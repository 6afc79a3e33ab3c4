"""Who reads the sockets: the thread that waits anyway, or else the I/O thread.

A message that the I/O thread reads for another thread costs two more thread switches than one which that
thread reads itself. So whoever waits for messages (a program in `Reply.result`, an idle actor's main thread)
reads the sockets as it wakes, and the I/O thread takes them over when nobody has been there for `CHECK_S`:
a busy main thread delays a message, or a question to the I/O thread, by that much. Where calls came in quick
succession until then, it looks less often, and the first delay may be twice `LIVELY_CHECK_S`.

States. On duty: the I/O loop watches the hub. Off duty: somebody `rests` on the hub, or did a moment ago; a
timer of the I/O loop looks after `CHECK_S` whether that is still so. While somebody rests and nothing
happens there is no timer: whoever wakes from a rest starts it.

Who rests does so in an epoll that mirrors the hub's. An actor's main loop does so in its selector and hands
what it found over before `select` returns: a turn of the loop between a message and its answer takes longer
than most of what happens there.
"""

import asyncio
import os
import select
import selectors
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from transport.zmq_hub import Hub, Ready

CHECK_S: Final = 0.002
LIVELY_CHECK_S: Final = 0.064
"""How seldom it is looked at who comes and goes. A look costs more than its own time; see decision 0010.
"""


class Read(Protocol):
    """Reads the sockets, and tells callers what their calls became; any thread."""

    def __call__(self, ready: Ready | None = None, /) -> object:
        """Read those that were found ready; None: look for them."""
        ...


class Watch:
    """Decides who reads.

    Args:
        loop: of the I/O thread.
        hub: the sockets.
        read: reads them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hub: Hub, read: Read) -> None:
        self._loop, self._hub, self._read = loop, hub, read
        self._entrance = threading.Lock()
        # The reader's own bell: another thread that reads would silence the hub's before the reader is awake.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bed = select.epoll()
        self._bed.register(self._bell, select.EPOLLIN)
        hub.mirror(self._bed)
        self._reader: int | None = None  # ident of the thread in `wait_until`
        self._others = 0  # threads that wait for a reply without reading
        self._reader_rests = self._loop_rests = False
        self._stirs = 0
        self._on_duty = self._check_is_due = False
        self._take_over()

    def __del__(self) -> None:
        self._bed.close()
        os.close(self._bell)

    # -- threads that wait ------------------------------------------------------------------------

    def enter(self) -> bool:
        """Become the one who reads; False where somebody is, or where others wait without reading."""
        with self._entrance:
            if self._reader is not None or self._others:
                self._others += 1
                return False
            self._reader = threading.get_ident()
            return True

    def leave(self, *, was_reader: bool) -> None:
        """Stop waiting; call it after `enter`, whatever that returned."""
        with self._entrance:
            if not was_reader:
                self._others -= 1
                return
            self._reader = None
            hand_over = self._others > 0
        if hand_over:
            self._call_io(self._take_over)

    def rest(self, timeout_s: float | None) -> None:
        """Wait for messages, at most so long, and read them; only after `enter` returned True."""
        self._reader_rests = True
        try:
            ready: Ready = self._bed.poll(timeout_s) if self._hub.rest() else ()
        finally:
            self._hub.wake()
            self._reader_rests = False
            self.stir()
        for descriptor, _ in ready:
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
        self._read(ready)

    def wake_reader(self) -> None:
        """Let the thread that rests look at its reply again, if it is another than this one."""
        if self._reader not in (None, threading.get_ident()):
            os.eventfd_write(self._bell, 1)

    # -- an event loop that rests on the hub ----------------------------------------------------------

    def mirror(self, epoll: select.epoll) -> None:
        """Have the loop's epoll find messages."""
        self._hub.mirror(epoll)

    def fell_asleep(self) -> bool:
        """The loop waits, the hub among what it waits for; False where it shall read instead."""
        self._loop_rests = True
        return self._hub.rest()

    def woke(self) -> None:
        """The loop does something."""
        self._loop_rests = False
        self._hub.wake()
        self.stir()

    # -- the I/O thread -------------------------------------------------------------------------------

    def stir(self) -> None:
        """Somebody else reads, or stopped doing so: look soon whether it is still there."""
        self._stirs += 1
        if not self._check_is_due:
            self._check_is_due = True
            self._call_io(self._go_off_duty)

    def stop(self) -> None:
        """Watch nothing any more; I/O thread."""
        if self._on_duty:
            self._loop.remove_reader(self._hub.fileno())
            self._hub.wake()
            self._on_duty = False

    def _go_off_duty(self) -> None:
        self.stop()
        self._loop.call_later(CHECK_S, self._check, self._stirs, CHECK_S)

    def _check(self, stirs: int, after_s: float) -> None:
        if self._others and self._reader is None:
            self._check_is_due = False
            self._take_over()
        elif self._stirs != stirs:  # it comes and goes
            after_s = min(2 * after_s, LIVELY_CHECK_S)
            self._loop.call_later(after_s, self._check, self._stirs, after_s)
        else:
            self._check_is_due = False  # before looking: who wakes after this calls us again
            if not (self._reader_rests or self._loop_rests):
                self._take_over()

    def _take_over(self) -> None:
        if not self._on_duty:
            self._on_duty = True
            self._loop.add_reader(self._hub.fileno(), self._read)
            if not self._hub.rest():
                self._loop.call_soon(self._read)

    def _call_io(self, action: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: the process is ending
            return


class RestingSelector(selectors.EpollSelector):
    """The selector of an actor's main loop: waits for the loop's own descriptors and for messages.

    Counts as one who reads while it waits. Messages have no key: they are handed over from inside `select`,
    where whoever gets them may use the loop as a callback of it may.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bed = select.epoll()
        self._own = self.fileno()
        self._bed.register(self._own, select.EPOLLIN)
        self._watch: Watch | None = None
        self._on_messages: Callable[[Ready], object]

    def wait_for_messages(self, watch: Watch, on_messages: Callable[[Ready], object]) -> None:
        """Wait for messages, too, from now on.

        Args:
            watch: told when the loop waits.
            on_messages: called with what was found; what it raises ends the loop.
        """
        watch.mirror(self._bed)
        self._watch, self._on_messages = watch, on_messages

    def wait_for_no_messages(self) -> None:
        """Wait only for what the loop watches."""
        self._watch = None

    def close(self) -> None:
        """Close the descriptors."""
        self._bed.close()
        super().close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait, and hand over what was found."""
        watch = self._watch
        if watch is None:
            return super().select(timeout)
        try:
            reads_now = not watch.fell_asleep()
            ready = self._bed.poll(0 if reads_now else timeout)
        finally:
            watch.woke()
        is_loops = any(descriptor == self._own for descriptor, _ in ready)
        if reads_now or len(ready) > is_loops:
            self._on_messages(ready)
        return super().select(0) if is_loops else []
