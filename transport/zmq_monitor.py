"""What happens to the connections of one ZeroMQ socket, as libzmq itself reports it."""

import asyncio
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.zmq_pump import Pump

_REFUSALS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_UNBIND_TIMEOUT_MS: Final = 1000


class Monitor:
    """Counts refused connections of a listener and knows when its address is free again.

    Args:
        loop: who reads the events.
        socket: to watch, before it is bound.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: "zmq.Socket[bytes]") -> None:
        self._watched = socket
        self._events: zmq.Socket[bytes] = socket.get_monitor_socket(_REFUSALS | zmq.EVENT_CLOSED)
        self._pump = Pump(loop, self._events, self._note)
        self.refused_connections = 0
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
        event = parse_monitor_message([bytes(frame) for frame in frames])["event"]
        self._is_unbound = self._is_unbound or event == zmq.EVENT_CLOSED
        self.refused_connections += bool(event & _REFUSALS)
