"""A control network inside one process, for tests: it delivers, and loses, when told to.

It keeps the promise of `transport.control`, proven by the same contract tests that ZeroMQ passes. Messages
are copied on the way, as a wire does. Nothing arrives before `deliver` or `run_until_idle`, which move the
clock to each message's moment, so that hours of delays pass in no time and every run is the same.

A link is one channel and what it exchanges with its listener. A cut address is silent both ways: what
channels send waits, within the high-water mark, and the listener's peers are unreachable, with all that was
on the way to them lost: as when a TCP connection breaks.
"""

import itertools
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from transport.address import Address
from transport.clock import ManualClock
from transport.control import DEFAULT_LIMITS, Frames, Limits, OnReply, OnRequest, check_frames, check_identity
from transport.errors import AddressError, ChannelClosed, ChannelFull, PeerUnreachable

_log = logging.getLogger(__name__)


class LoopbackNetwork:
    """A network of `loop://` addresses.

    Args:
        clock: tells when a message is due; moved forward by deliveries.
    """

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._exchange = _Exchange(clock)
        self._closed = False

    def listen(
        self, address: Address, on_message: OnRequest, limits: Limits = DEFAULT_LIMITS
    ) -> "LoopbackListener":
        """Listen at an address; see `transport.control.Network.listen`."""
        self._check(address)
        if address in self._exchange.listeners:
            raise AddressError(str(address), "is in use: somebody listens there")
        listener = LoopbackListener(self._exchange, address, on_message, limits)
        self._exchange.listeners[address] = listener
        return listener

    def connect(
        self,
        address: Address,
        on_message: OnReply,
        *,
        identity: bytes | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> "LoopbackChannel":
        """Open a channel to an address; see `transport.control.Network.connect`."""
        self._check(address)
        check_identity(identity)
        name = identity or b"\0" + next(self._exchange.numbers).to_bytes(4, "big")
        channel = LoopbackChannel(self._exchange, address, on_message, name, limits)
        self._exchange.channels[channel] = None
        return channel

    def close(self) -> None:
        """Close everything this network made; the second time does nothing."""
        self._closed = True
        self._exchange.listeners.clear()
        self._exchange.channels.clear()

    def deliver(self, until_s: float | None = None) -> int:
        """Deliver what is due, and what is sent in answer to it, in order of moment and sending.

        Args:
            until_s: the moment to move the clock to, at least now; none is now.

        Returns:
            How many messages were delivered.
        """
        horizon_s = self._clock.monotonic() if until_s is None else until_s
        delivered = self._deliver_all(horizon_s)
        self._clock.advance(max(0.0, horizon_s - self._clock.monotonic()))
        return delivered

    def run_until_idle(self) -> int:
        """Deliver all that can be delivered, whenever it is due; return how many messages that were."""
        return self._deliver_all(float("inf"))

    def set_delay(self, address: Address, delay_s: float) -> None:
        """Let every message sent from now on to or from a listener take `delay_s` seconds."""
        self._exchange.delays_s[address] = delay_s

    def drop_next(self, address: Address, messages: int) -> None:
        """Lose the next so many messages sent to or from a listener."""
        self._exchange.to_drop[address] = messages

    def cut(self, address: Address) -> None:
        """Break the connections of a listener, and let no new one come about."""
        self._exchange.cut.add(address)
        self._exchange.disconnect(address)

    def heal(self, address: Address) -> None:
        """Let connections come about again; what channels sent meanwhile is delivered."""
        self._exchange.cut.discard(address)

    def _check(self, address: Address) -> None:
        if self._closed:
            raise ChannelClosed(str(address))
        if address.scheme != "loop":
            raise AddressError(str(address), "is not of a LoopbackNetwork", "use loop://name")

    def _deliver_all(self, horizon_s: float) -> int:
        delivered = 0
        while (lane := self._exchange.first_lane(horizon_s)) is not None:
            lane.deliver_first(self._clock)
            delivered += 1
        return delivered


class LoopbackListener:
    """See `transport.control.Listener`. Made by `LoopbackNetwork.listen`."""

    def __init__(
        self, exchange: "_Exchange", address: Address, on_message: OnRequest, limits: Limits
    ) -> None:
        self.address, self.on_message = address, on_message
        self._exchange, self._limits = exchange, limits

    def send(self, peer: bytes, frames: Frames) -> None:
        """Accept a message for one connected channel; see `transport.control.Listener.send`."""
        if self._exchange.listeners.get(self.address) is not self:
            raise ChannelClosed(str(self.address))
        check_frames(frames, self._limits)
        channel = self._exchange.peer(self.address, peer)
        if channel is None:
            raise PeerUnreachable(peer, str(self.address))
        self._exchange.post(channel.replies, f"peer {peer!r} of {self.address}", frames)

    def close(self) -> None:
        """Give the address up; the second time does nothing."""
        if self._exchange.listeners.get(self.address) is self:
            del self._exchange.listeners[self.address]
            self._exchange.disconnect(self.address)


class LoopbackChannel:
    """See `transport.control.Channel`. Made by `LoopbackNetwork.connect`."""

    def __init__(
        self, exchange: "_Exchange", address: Address, on_message: OnReply, identity: bytes, limits: Limits
    ) -> None:
        self.address, self.identity, self._exchange = address, identity, exchange
        self.requests = _Lane(address, self._request, limits)
        self.replies = _Lane(address, on_message, limits)

    def send(self, frames: Frames) -> None:
        """Accept a message for the listener; see `transport.control.Channel.send`."""
        if self not in self._exchange.channels:
            raise ChannelClosed(str(self.address))
        self._exchange.post(self.requests, str(self.address), frames)

    def close(self) -> None:
        """Disconnect and forget all waiting messages; the second time does nothing."""
        self._exchange.channels.pop(self, None)

    def _request(self, frames: list[memoryview]) -> None:
        self._exchange.listeners[self.address].on_message(self.identity, frames)


class _Parcel(NamedTuple):
    """One message on its way; sorts by moment, then by order of sending."""

    due_s: float
    number: int
    frames: list[bytes]


@dataclass
class _Lane:
    """One direction of a link."""

    address: Address
    on_message: OnReply
    limits: Limits
    parcels: deque[_Parcel] = field(default_factory=deque)

    def deliver_first(self, clock: ManualClock) -> None:
        """Move the clock to the first message's moment and hand it over."""
        parcel = self.parcels.popleft()
        clock.advance(max(0.0, parcel.due_s - clock.monotonic()))
        try:
            self.on_message([memoryview(bytearray(frame)) for frame in parcel.frames])
        except Exception:  # noqa: BLE001 - as the real one: the sender must not be hit by it
            _log.exception("a message's callback failed")


class _Exchange:
    """Who is connected to whom, what is on the way, and which faults were asked for."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.numbers = itertools.count(1)
        self.listeners: dict[Address, LoopbackListener] = {}
        self.channels: dict[LoopbackChannel, None] = {}  # a set that keeps the order of connecting
        self.delays_s: dict[Address, float] = {}
        self.to_drop: dict[Address, int] = {}
        self.cut: set[Address] = set()

    def peer(self, address: Address, identity: bytes) -> LoopbackChannel | None:
        """Find who connected last with an identity."""
        if address in self.cut:
            return None
        same = (c for c in reversed(self.channels) if (c.address, c.identity) == (address, identity))
        return next(same, None)

    def post(self, lane: _Lane, receiver: str, frames: Frames) -> None:
        """Put a message on its way, or lose it if that was asked for."""
        check_frames(frames, lane.limits)
        if len(lane.parcels) >= lane.limits.high_water_messages:
            raise ChannelFull(receiver, lane.limits.high_water_messages)
        if self.to_drop.get(lane.address, 0) > 0:
            self.to_drop[lane.address] -= 1
            return
        due_s = self._clock.monotonic() + self.delays_s.get(lane.address, 0.0)
        if lane.parcels:  # a shorter delay overtakes nobody
            due_s = max(due_s, lane.parcels[-1].due_s)
        lane.parcels.append(_Parcel(due_s, next(self.numbers), [bytes(frame) for frame in frames]))

    def disconnect(self, address: Address) -> None:
        """Lose what is on the way to the peers of a listener."""
        for channel in self.channels:
            if channel.address == address:
                channel.replies.parcels.clear()

    def first_lane(self, horizon_s: float) -> _Lane | None:
        """Find where the next message is due, if one is until `horizon_s`."""
        open_channels = [
            c for c in self.channels if c.address in self.listeners and c.address not in self.cut
        ]
        waiting = [lane for c in open_channels for lane in (c.requests, c.replies) if lane.parcels]
        first = min(waiting, key=lambda lane: lane.parcels[0][:2], default=None)
        return first if first is not None and first.parcels[0].due_s <= horizon_s else None
