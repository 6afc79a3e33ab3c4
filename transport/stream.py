"""Byte streams between hosts, for what is too large for messages: framed, and received in place.

A frame is a small record and, where it has one, a payload, which the receiver reads straight into the memory
it is for. Connections are plain TCP: encrypting tensors costs more than sending them. So that no stranger
is heard, a listener gives out tickets; they travel by the run's own messages, which are encrypted, each opens
one connection within `TICKET_S`, and a connection that brings none is closed without a byte. Whoever can
alter packets on the wire can alter payloads: keep the wire private, as for NCCL, and checksum what arrives.

Every wait has a deadline, counted from the last byte that moved.
"""

import contextlib
import errno
import itertools
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from transport.address import Address
from transport.closing import Closing
from transport.errors import TransportError
from transport.ports import bind_allowed, listening_socket

TICKET_BYTES: Final = 32
TICKET_S: Final = 30.0
"""How long a ticket opens a connection."""

HANDSHAKE_S: Final = 5.0
MAX_STRANGERS: Final = 64
"""Connections that have brought no ticket yet; further ones are closed."""

MAX_RECORD_BYTES: Final = 256 << 20

MAX_VIEWS: Final = 1024
"""What one system call takes (IOV_MAX of Linux)."""

_HEAD: Final = struct.Struct("<IQ")  # bytes of the record, bytes of the payload
_TIMED_OUT: Final = (errno.EAGAIN, errno.EWOULDBLOCK)


class StreamError(TransportError):
    """A stream is of no use any more.

    Args:
        peer: who is at the other end.
        fact: what happened.
    """

    def __init__(self, peer: str, fact: str) -> None:
        self.peer, self.fact = peer, fact
        super().__init__(f"the stream with {peer} {fact}")


class StreamTimeoutError(StreamError):
    """Nothing moved for as long as one may wait."""


class Stream(Closing):
    """One connection; one thread may send while another receives, and any may `end` it.

    Attributes:
        peer: who is at the other end.
        timeout_s: how long a send or a receive may stand still.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._connection, self.timeout_s = connection, timeout_s
        # The kernel's own time-outs: with Python's, every receive would be two system calls and short.
        connection.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: Address, ticket: bytes, timeout_s: float) -> Self:
        """Connect to a `StreamListener` with a ticket of its own.

        Raises:
            StreamError: nobody is there.
        """
        try:
            connection = socket.create_connection((address.host, address.port), timeout_s)
        except OSError as error:
            raise StreamError(str(address), f"could not be opened: {error}") from error
        stream = cls(connection, str(address), timeout_s)
        stream._send_all(memoryview(ticket))
        return stream

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `receive`."""
        return self._connection.fileno()

    def is_spoken_to(self, timeout_s: float | None) -> bool:
        """Wait until there is something to `receive`, the end of the stream included; None waits for ever."""
        waits = select.poll()
        waits.register(self._connection.fileno(), select.POLLIN)
        return bool(waits.poll(None if timeout_s is None else timeout_s * 1000))

    def send(self, record: bytes, *payload: memoryview) -> None:
        """Send one frame, straight from where its payload lies.

        Args:
            record: what is said.
            payload: views of bytes, one after the other.

        Raises:
            StreamTimeoutError: the other end takes nothing.
            StreamError: it is gone, or this end is closed.
        """
        head = _HEAD.pack(len(record), sum(view.nbytes for view in payload)) + record
        self._send_all(memoryview(head), *payload)

    def receive(self) -> tuple[bytes, int]:
        """Wait for a frame; return its record, and how many bytes `receive_into` has to take next.

        Raises:
            StreamTimeoutError: nothing came.
            StreamError: the other end is gone or speaks something else, or this end is closed.
        """
        record_bytes, payload_bytes = _HEAD.unpack(self._receive_exactly(_HEAD.size))
        if record_bytes > MAX_RECORD_BYTES:
            raise StreamError(self.peer, f"announced a record of {record_bytes} bytes")
        return self._receive_exactly(record_bytes), payload_bytes

    def receive_into(self, target: memoryview) -> None:
        """Receive the next bytes of a payload, as many as `target` has.

        Raises:
            StreamTimeoutError: nothing came.
            StreamError: the other end is gone, or this end is closed.
        """
        done = 0
        while done < len(target):
            try:
                count = self._connection.recv_into(target[done:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._failure(error, "sent nothing") from error
            if not count:
                raise StreamError(self.peer, "was ended by the other end")
            done += count

    def end(self) -> None:
        """Let whoever waits in the stream, at either end, fail at once; any thread."""
        with contextlib.suppress(OSError):  # closed already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the stream and give its descriptor back: for the thread that uses it. Idempotent."""
        self.end()
        self._connection.close()

    def _send_all(self, *data: memoryview) -> None:
        left = deque(data)
        while left:
            try:
                sent = self._connection.sendmsg(itertools.islice(left, MAX_VIEWS))
            except OSError as error:
                raise self._failure(error, "took nothing") from error
            while left and sent >= len(left[0]):
                sent -= len(left.popleft())
            if sent:
                left[0] = left[0][sent:]

    def _receive_exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def _failure(self, error: OSError, what: str) -> StreamError:
        if error.errno in _TIMED_OUT:
            return StreamTimeoutError(self.peer, f"{what} for {self.timeout_s:g} s")
        return StreamError(self.peer, f"broke: {error.strerror or error}")


class StreamListener:
    """Takes the connections of those who bring a ticket.

    Args:
        host: where to listen, an IP address or a name of this host; the port is any that is allowed.
        timeout_s: how long a connection may stand still in a send or a receive.

    Raises:
        OSError: the host is not this one's.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._socket = bind_allowed(lambda port: listening_socket(host, port, MAX_STRANGERS))
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._guests: dict[bytes, tuple[float, Callable[[Stream], None]]] = {}
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self.address = Address.tcp(host, self._socket.getsockname()[1])
        self.refused = 0
        threading.Thread(target=self._accept, name="stream-listener", daemon=True).start()

    def ticket(self, on_stream: Callable[[Stream], None]) -> bytes:
        """Make a ticket; its bearer's stream is given to `on_stream`, in a thread of its own."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        now = time.monotonic()
        with self._lock:
            self._guests = {key: guest for key, guest in self._guests.items() if guest[0] > now}
            self._guests[ticket] = (now + TICKET_S, on_stream)
        return ticket

    def close(self) -> None:
        """Take no further connections; those there are go on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # closed, or out of descriptors, which a listener cannot repair
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._meet, args=(connection, f"{peer[0]}:{peer[1]}"), name="stream", daemon=True
            ).start()

    def _meet(self, connection: socket.socket, peer: str) -> None:
        try:
            on_stream = self._admitted(connection)
        finally:
            self._strangers.release()
        if on_stream is None:
            self.refused += 1
            connection.close()
            return
        with Stream(connection, peer, self._timeout_s) as stream:
            on_stream(stream)

    def _admitted(self, connection: socket.socket) -> Callable[[Stream], None] | None:
        deadline = time.monotonic() + HANDSHAKE_S
        ticket = b""
        with contextlib.suppress(OSError):
            while len(ticket) < TICKET_BYTES and (left_s := deadline - time.monotonic()) > 0:
                connection.settimeout(left_s)
                part = connection.recv(TICKET_BYTES - len(ticket))
                if not part:
                    return None
                ticket += part
        # The look-up compares hashes before bytes, and a ticket is good once: there is nothing to time.
        with self._lock:
            expires, on_stream = self._guests.pop(ticket, (0.0, None))
        return on_stream if expires > time.monotonic() else None
