"""The control network over ZeroMQ: a listener is a ROUTER, a channel a DEALER, and the event loop reads both.

How the options of libzmq keep the promise of `transport.control`:

- bounded: SNDHWM and RCVHWM, and sends never wait. A DEALER queues for a listener that is not there yet
  (IMMEDIATE off), but no further than its high-water mark, so that connect may come before listen.
- nobody is lost in silence: ROUTER_MANDATORY makes an unknown peer an error, and ROUTER_HANDOVER gives an
  identity to its newest connection, so that a peer that reconnects is not shadowed by its own dead one.
- broken connections are noticed: ZMTP heartbeats, answered by libzmq's own thread however busy Python is.
- reconnects are quick: after 1 ms, doubling up to 100 ms, for as long as it takes.
- BACKLOG is what a start of thousands needs: the kernel drops connections beyond it without a word.

libzmq takes over an AF_UNIX path from whoever listens there. Therefore `listen` first tries to connect to it.
"""

import asyncio
import contextlib
import errno
import socket as sockets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import zmq

from transport.address import Address
from transport.control import DEFAULT_LIMITS, Frames, Limits, OnReply, OnRequest, check_frames, check_identity
from transport.errors import AddressError, ChannelClosed, ChannelFull, KeysError, PeerUnreachable
from transport.ports import bind_allowed
from transport.security import CurveKeys, Gatekeeper
from transport.zmq_hub import Hub, Watcher
from transport.zmq_monitor import Monitor
from transport.zmq_pump import Pump

_MAX_SOCKETS: Final = 16384
_BACKLOG_CONNECTIONS: Final = 4096
_RECONNECT_MS: Final = 1
_RECONNECT_MAX_MS: Final = 100
_CURVE_OVERHEAD_BYTES: Final = 64
"""An encrypted frame is 33 bytes longer than its content (RFC 26)."""


class ZmqNetwork:
    """Listeners and channels over `ipc://` and `tcp://`, in one context.

    Everything is used from the loop's thread only: ZeroMQ's sockets belong to one thread. With a hub, any
    thread that holds the hub's lock may connect, send and close channels, and callbacks run in `Hub.read`.

    Args:
        loop: who reads the sockets; none is the running loop.
        keys: of the run; without them there is no `tcp://`, since there is no insecure way.
        hub: reads the sockets instead of the loop, which then only watches connections come and go.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        keys: CurveKeys | None = None,
        hub: Hub | None = None,
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._reader: Watcher = hub or self._loop
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = _MAX_SOCKETS
        self._gatekeeper: Gatekeeper | None = None
        self._open: set[ZmqListener | ZmqChannel] = set()

    def listen(
        self, address: Address, on_message: OnRequest, limits: Limits = DEFAULT_LIMITS
    ) -> "ZmqListener":
        """Listen at an address; see `transport.control.Network.listen`.

        Raises:
            KeysError: `tcp://` without keys.
        """
        self._check(address)
        if address.scheme == "ipc":
            _check_nobody_listens(address)
        if address.scheme == "tcp" and self._keys and not self._gatekeeper:
            self._gatekeeper = Gatekeeper(self._context, self._loop, self._keys)
        socket = self._socket(zmq.ROUTER, address, limits)
        listener = ZmqListener(
            socket,
            address,
            on_message,
            loop=self._loop,
            reader=self._reader,
            limits=limits,
            on_close=self._open.discard,
        )
        self._open.add(listener)
        return listener

    def connect(
        self,
        address: Address,
        on_message: OnReply,
        *,
        identity: bytes | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> "ZmqChannel":
        """Open a channel to an address; see `transport.control.Network.connect`.

        Raises:
            KeysError: `tcp://` without keys.
        """
        self._check(address)
        check_identity(identity)
        if address.scheme == "tcp" and not address.port:
            raise AddressError(
                str(address), "has port 0, which nobody listens at", "ask the listener for its address"
            )
        socket = self._socket(zmq.DEALER, address, limits)
        if identity is not None:
            socket.routing_id = identity
        channel = ZmqChannel(
            socket, address, on_message, reader=self._reader, limits=limits, on_close=self._open.discard
        )
        self._open.add(channel)
        return channel

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything this network made; the second time does nothing.

        Args:
            linger_s: how long what was accepted may take to leave this process; 0 forgets it.
        """
        for end in tuple(self._open):
            end.close(linger_s)
        if self._gatekeeper:
            self._gatekeeper.close()
        self._context.term()

    def _check(self, address: Address) -> None:
        if self._context.closed:
            raise ChannelClosed(str(address))
        if address.scheme == "loop":
            raise AddressError(str(address), "is for a LoopbackNetwork", "use ipc:// or tcp://")
        if address.scheme == "tcp" and not self._keys:
            raise KeysError(str(address), "tcp:// needs the keys of the run, and this network has none")

    def _socket(self, kind: int, address: Address, limits: Limits) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in _options(address, limits):
            socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if address.scheme == "tcp" and self._keys:
            secure = self._keys.secure_listener if kind == zmq.ROUTER else self._keys.secure_channel
            secure(socket)
        return socket


class ZmqListener:
    """A ROUTER; see `transport.control.Listener`. Made by `ZmqNetwork.listen`."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        address: Address,
        on_message: OnRequest,
        *,
        loop: asyncio.AbstractEventLoop,
        reader: Watcher,
        limits: Limits,
        on_close: "Callable[[ZmqListener], None]",
    ) -> None:
        self._on_message, self._limits, self._on_close = on_message, limits, on_close
        self._monitor = Monitor(loop, socket)
        try:
            self._address = _bind(socket, address)
        except AddressError:
            self._monitor.close()
            socket.close(linger=0)
            raise
        self._socket = socket
        self._pump = Pump(reader, socket, self._receive, small_frames=1)
        self.oversized_messages = 0
        """Messages that were over the limit and not delivered; their sender has other limits."""

    @property
    def address(self) -> Address:
        """Where channels connect to; the port is filled in."""
        return self._address

    @property
    def refused_connections(self) -> int:
        """Connections that were closed because they spoke no ZMTP, or had not the keys of the run."""
        return self._monitor.refused_connections

    def send(self, peer: bytes, frames: Frames) -> None:
        """Accept a message for one connected channel; see `transport.control.Listener.send`."""
        if self._pump.closed:
            raise ChannelClosed(str(self._address))
        check_frames(frames, self._limits)
        try:
            self._pump.send([peer, *frames])
        except zmq.Again:
            raise ChannelFull(f"peer {peer!r} of {self._address}", self._limits.high_water_messages) from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise PeerUnreachable(peer, str(self._address)) from None

    def close(self, linger_s: float = 0.0) -> None:
        """Give the address up, for somebody else to take at once; the second time does nothing.

        Args:
            linger_s: as of a network; then the address is free when the network is closed.
        """
        if not self._pump.closed:
            _remove_socket_file(self._address)
            if not linger_s:  # to stop listening ends the connections, and what waits for them is lost
                self._socket.unbind(_endpoint_of(self._socket))
                self._monitor.wait_until_unbound()
            self._monitor.close()
            self._pump.close(linger_s)
            self._on_close(self)

    def _receive(self, frames: list[memoryview]) -> None:
        peer, rest = frames[0], frames[1:]
        nbytes = rest[0].nbytes if len(rest) == 1 else sum(frame.nbytes for frame in rest)
        if nbytes > self._limits.max_message_bytes:
            self.oversized_messages += 1
        else:
            self._on_message(bytes(peer), rest)


class ZmqChannel:
    """A DEALER; see `transport.control.Channel`. Made by `ZmqNetwork.connect`."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        address: Address,
        on_message: OnReply,
        *,
        reader: Watcher,
        limits: Limits,
        on_close: "Callable[[ZmqChannel], None]",
    ) -> None:
        self._address, self._limits, self._on_close = address, limits, on_close
        socket.connect(str(address))
        self._pump = Pump(reader, socket, on_message)

    def send(self, frames: Frames) -> None:
        """Accept a message for the listener; see `transport.control.Channel.send`."""
        if self._pump.closed:
            raise ChannelClosed(str(self._address))
        check_frames(frames, self._limits)
        try:
            self._pump.send(frames)
        except zmq.Again:
            raise ChannelFull(str(self._address), self._limits.high_water_messages) from None

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect and forget all waiting messages; the second time does nothing."""
        if not self._pump.closed:
            self._pump.close(linger_s)
            self._on_close(self)


def _options(address: Address, limits: Limits) -> list[tuple[int, int]]:
    heartbeat_timeout_ms = int(limits.heartbeat_timeout_s * 1000)
    return [
        (zmq.LINGER, 0),
        (zmq.SNDHWM, limits.high_water_messages),
        (zmq.RCVHWM, limits.high_water_messages),
        (zmq.MAXMSGSIZE, limits.max_message_bytes + _CURVE_OVERHEAD_BYTES),
        (zmq.HEARTBEAT_IVL, int(limits.heartbeat_interval_s * 1000)),
        (zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms),
        (zmq.HEARTBEAT_TTL, heartbeat_timeout_ms),
        (zmq.CONNECT_TIMEOUT, heartbeat_timeout_ms),
        (zmq.RECONNECT_IVL, _RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
        (zmq.BACKLOG, _BACKLOG_CONNECTIONS),
        (zmq.IPV6, int(address.is_ipv6)),
    ]


def _bind(socket: "zmq.Socket[bytes]", address: Address) -> Address:
    try:
        if address.scheme == "tcp" and address.port == 0:
            bind_allowed(lambda port: socket.bind(str(address.with_port(port))))
        else:
            socket.bind(str(address))
    except zmq.ZMQError as error:
        hint = "port 0 takes any free one" if error.errno == errno.EADDRINUSE else ""
        raise AddressError(str(address), f"cannot be listened on: {error.strerror}", hint) from None
    if address.scheme == "ipc":
        return address
    return address.with_port(int(_endpoint_of(socket).rpartition(":")[2]))


def _endpoint_of(socket: "zmq.Socket[bytes]") -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return bytes(endpoint).rstrip(b"\0").decode() if isinstance(endpoint, bytes) else str(endpoint)


def _remove_socket_file(address: Address) -> None:
    """Remove what libzmq leaves; while this listens still, it cannot be a successor's."""
    if address.scheme == "ipc":
        with contextlib.suppress(OSError):  # a file that stays is taken over by the next listener
            Path(address.path).unlink()


def _check_nobody_listens(address: Address) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as probe:
        refusal = probe.connect_ex(address.path)
    if refusal in (0, errno.EAGAIN):
        raise AddressError(str(address), "is in use: somebody listens there")
