"""Drains one ZeroMQ socket on an event loop, without zmq.asyncio (which costs five times the CPU).

The file descriptor of a ZeroMQ socket is edge-triggered: it becomes readable when the socket's state changed,
not while it has messages, and any call on the socket may consume the change. So:

- a wake-up reads until nothing is left, or `DRAIN_MESSAGES` have been read and the loop is asked for another
  turn, so that a flood starves nobody;
- after every send, refused ones included, the socket is asked whether it became readable meanwhile;
- a hub lets that wait until somebody would sleep (see `zmq_hub`), also after a message that came alone: the
  answer to it is on its way before anybody looks for a second one;
- whatever a callback raises, the rest is still read.
"""

from collections.abc import Callable, Sequence
from typing import Final

import zmq

from transport.control import Frame
from transport.zmq_hub import Hub, Watcher

DRAIN_MESSAGES: Final = 100
"""How many messages are read before other callbacks of the loop have their turn."""

COPY_SEND_BYTES: Final = 64 * 1024
"""Frames from here on are lent to libzmq; copying smaller ones is cheaper than keeping track of them."""

COPY_RECEIVE_BYTES: Final = 8 * 1024
"""Frames below are copied: libzmq reads into blocks of this size, which a view of 10 bytes would keep."""

# Plain integers: joining pyzmq's enum flags costs more than a send.
_LAST_FRAME: Final = int(zmq.NOBLOCK)
_MORE_FRAMES: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)


class Pump:
    """One socket, read by the loop from now on.

    Args:
        loop: who reads: the event loop whose thread owns the socket, or the hub whose lock guards it.
        socket: made, bound or connected by the caller; closed by `close`.
        on_frames: called by the reader with all frames of each message.
        small_frames: how many small frames every message has before its others; they are copied right away.
    """

    def __init__(
        self,
        loop: Watcher,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[memoryview]], None],
        *,
        small_frames: int = 0,
    ) -> None:
        self._loop, self._socket, self._on_frames = loop, socket, on_frames
        self._small_frames = small_frames
        # libzmq's own send: what `zmq.Socket` does around it is for sockets of other kinds, and takes time.
        self._send: Callable[..., object] = super(zmq.Socket, socket).send
        self._descriptor = socket.fileno()
        self._hub = loop if isinstance(loop, Hub) else None
        self._drain_is_due = self._is_in_doubt = False
        self._is_flooded = False  # several messages came at once: more are expected than one
        self.closed = False
        loop.add_reader(self._descriptor, self._woken)
        self._schedule()  # what came before the loop watched has had its edge

    def send(self, frames: Sequence[Frame]) -> None:
        """Hand a whole message to libzmq, without waiting.

        Raises:
            zmq.Again: the queue is full; nothing was sent.
            zmq.ZMQError: another refusal of the first frame; nothing was sent.
        """
        try:
            for frame in frames[:-1]:
                self._send(frame, _MORE_FRAMES, _is_small(frame))
            self._send(frames[-1], _LAST_FRAME, _is_small(frames[-1]))
        finally:  # also where libzmq refused: it may have consumed the edge all the same
            if not (self._drain_is_due or self._is_in_doubt):
                self._doubt()

    def close(self, linger_s: float = 0.0) -> None:
        """Stop reading and close the socket; the second time does nothing.

        Args:
            linger_s: how long libzmq may go on sending what was accepted; 0 forgets it.
        """
        if self.closed:
            return
        self.closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=int(linger_s * 1000))

    def _woken(self) -> None:
        if not self._drain_is_due:  # else two would be due from now on, and a flood wakes often
            self._drain()

    def _schedule(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _doubt(self) -> None:
        if self._hub is not None and self._hub.look_later(self._look):
            self._is_in_doubt = True
        else:
            self._look()

    def _look(self) -> None:
        self._is_in_doubt = False
        if not (self._drain_is_due or self.closed) and self._is_readable():
            self._schedule()

    def _drain(self) -> None:
        was_due, self._drain_is_due = self._drain_is_due, False
        if self.closed:
            return
        for messages in range(DRAIN_MESSAGES):
            try:
                frames = self._receive()
            except zmq.Again:  # somebody read it already, or it was another change of state
                self._is_flooded = messages > 1
                return
            self._deliver(frames)
            if not self._reads_on(was_due=was_due):
                return
        self._schedule()

    def _reads_on(self, *, was_due: bool) -> bool:
        """Return whether to look for one more message now; `Again` costs twice what asking does."""
        if self.closed or self._is_flooded:
            return not self.closed
        if self._hub is not None and not was_due:
            self._doubt()
            return False
        self._is_flooded = self._is_readable()
        return self._is_flooded

    def _is_readable(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)

    def _receive(self) -> list[memoryview]:
        frames = [memoryview(bytearray(self._socket.recv(_LAST_FRAME))) for _ in range(self._small_frames)]
        while True:
            frame = self._socket.recv(_LAST_FRAME, copy=False)
            frames.append(_view_of(frame))
            if not frame.more:  # it comes with the frame; to ask the socket takes longer than the frame
                return frames

    def _deliver(self, frames: list[memoryview]) -> None:
        try:
            self._on_frames(frames)
        except Exception as error:  # noqa: BLE001 - an unread rest would be stuck: no new edge comes for it
            self._loop.call_exception_handler({"message": "a message's callback failed", "exception": error})


def _is_small(frame: Frame) -> bool:
    return (len(frame) if type(frame) is bytes else memoryview(frame).nbytes) < COPY_SEND_BYTES


def _view_of(frame: zmq.Frame) -> memoryview:
    view: memoryview = frame.buffer
    return view if view.nbytes >= COPY_RECEIVE_BYTES else memoryview(bytearray(view))
