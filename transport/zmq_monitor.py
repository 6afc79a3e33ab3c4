"""What happens to the connections of one ZeroMQ listener, as libzmq itself reports it."""

import asyncio
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.zmq_pump import Pump

_EVENTS: Final = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)
_UNBIND_TIMEOUT_MS: Final = 1000


class Monitor:
    """Counts the connections that ended before they began, and knows when the address is free again.

    libzmq names only some reasons for a refusal. So a refused connection is one that was accepted and
    disconnected without a handshake between. What speaks like ZMTP 1 passes for a peer on `ipc://`; its
    messages are for the codec to refuse.

    Args:
        loop: who reads the events.
        socket: to watch, before it is bound.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: "zmq.Socket[bytes]") -> None:
        self._watched = socket
        self._events: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)
        self._pump = Pump(loop, self._events, self._note)
        self.refused_connections = 0
        self._strangers: set[int] = set()  # descriptors of connections whose handshake is not done
        self._is_unbound = False

    def wait_until_unbound(self) -> None:
        """Wait until libzmq's thread has closed the listening socket, which takes it well below 1 ms."""
        while not self._is_unbound and self._events.poll(_UNBIND_TIMEOUT_MS):
            self._note([memoryview(frame) for frame in self._events.recv_multipart(zmq.NOBLOCK)])

    def close(self) -> None:
        """Stop watching."""
        self._watched.disable_monitor()
        self._pump.close()

    def _note(self, frames: list[memoryview]) -> None:
        message = parse_monitor_message([bytes(frame) for frame in frames])
        event, descriptor = message["event"], message["value"]
        if event == zmq.EVENT_ACCEPTED:
            self._strangers.add(descriptor)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._strangers.discard(descriptor)
        elif event == zmq.EVENT_DISCONNECTED and descriptor in self._strangers:
            self._strangers.discard(descriptor)
            self.refused_connections += 1
        elif event == zmq.EVENT_CLOSED:
            self._is_unbound = True
