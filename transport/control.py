"""The promise of a control network, which ZeroMQ keeps between processes and `loopback` inside one.

A listener has an address and hears many channels; each channel reaches one listener and has an identity, by
which the listener answers. A message is a sequence of frames: one or more buffers of any size, 0 included.

- Order: messages of one sender to one receiver arrive in the order they were sent.
- At most once: a message that was accepted arrives once, or not at all if an end of its connection dies.
  Nothing is retried; an answer is the only proof of arrival.
- Bounded: `send` never waits. Once `high_water_messages` wait on the way, it raises `ChannelFull`.
- A channel may be opened before its listener exists: what is sent until then waits, within the same bound.
  A listener that comes back at the same address hears its channels again without their doing anything.
- An identity belongs to whoever connected with it last.
- Callbacks run one at a time on the event loop, never inside of `send`. What one raises is reported to the
  loop's exception handler, and the message counts as delivered.
- Both ends must use the same `Limits`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from transport.address import Address
from transport.errors import MessageTooLarge

Frame = bytes | memoryview
Frames = Sequence[Frame]

OnRequest = Callable[[bytes, list[memoryview]], None]
"""What a listener does with a message: the identity of the channel it came by, and its frames."""

OnReply = Callable[[list[memoryview]], None]
"""What a channel does with a message of its listener."""

IDENTITY_LIMIT_BYTES: Final = 255


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a channel.

    Args:
        max_message_bytes: all frames of one message together.
        high_water_messages: how many may wait, on each side of a connection and in each direction.
        heartbeat_interval_s: how often a silent connection is asked for a sign of life.
        heartbeat_timeout_s: a connection without one for so long is closed, and opened anew. It must be
            longer than the largest message travels: no sign of life gets past a message on its way.
    """

    max_message_bytes: int = 64 * 2**20
    high_water_messages: int = 1000
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 5.0


DEFAULT_LIMITS: Final = Limits()


class Listener(Protocol):
    """The end that has an address."""

    @property
    def address(self) -> Address:
        """Where channels connect to; the port is filled in."""
        ...

    def send(self, peer: bytes, frames: Frames) -> None:
        """Accept a message for one connected channel, or refuse it as a whole; never wait.

        Args:
            peer: the channel's identity, as the callback had it.
            frames: at least one; large ones are not copied and must not change until they arrived.

        Raises:
            PeerUnreachable: no channel of this identity is connected.
            ChannelFull: the channel does not keep up.
            MessageTooLarge: the frames are over the limit.
            ChannelClosed: this listener was closed.
            ValueError: there is no frame, or one is not contiguous.
        """
        ...

    def close(self) -> None:
        """Give the address up and forget all waiting messages; the second time does nothing."""
        ...


class Channel(Protocol):
    """The end that connects to a listener, and again whenever the connection breaks."""

    def send(self, frames: Frames) -> None:
        """Accept a message for the listener, or refuse it as a whole; never wait.

        Args:
            frames: at least one; large ones are not copied and must not change until they arrived.

        Raises:
            ChannelFull: the listener is not there or does not keep up.
            MessageTooLarge: the frames are over the limit.
            ChannelClosed: this channel was closed.
            ValueError: there is no frame, or one is not contiguous.
        """
        ...

    def close(self) -> None:
        """Disconnect and forget all waiting messages; the second time does nothing."""
        ...


class Network(Protocol):
    """What makes listeners and channels, and closes them."""

    def listen(self, address: Address, on_message: OnRequest, limits: Limits = DEFAULT_LIMITS) -> Listener:
        """Listen at an address.

        Raises:
            AddressError: somebody else listens there, or it is not of this network or host.
            ChannelClosed: the network was closed.
        """
        ...

    def connect(
        self,
        address: Address,
        on_message: OnReply,
        *,
        identity: bytes | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Channel:
        """Open a channel to an address, whether or not somebody listens there yet.

        Args:
            address: the listener's.
            on_message: called with the frames of each answer.
            identity: 1 to 255 bytes, the first not 0; none lets the network make one up.
            limits: as the listener's.

        Raises:
            AddressError: it is not of this network, or its port is 0.
            ChannelClosed: the network was closed.
            ValueError: the identity is not allowed.
        """
        ...

    def close(self) -> None:
        """Close everything this network made."""
        ...


def check_identity(identity: bytes | None) -> None:
    """Check that an identity can be told from the ones a network makes up, which start with 0.

    Raises:
        ValueError: it is empty, too long or starts with 0.
    """
    if identity is not None and not (1 <= len(identity) <= IDENTITY_LIMIT_BYTES and identity[0]):
        raise ValueError(
            f"an identity has 1 to {IDENTITY_LIMIT_BYTES} bytes and starts not with 0: {identity!r}"
        )


def check_frames(frames: Frames, limits: Limits) -> list[int]:
    """Check that a message can be sent, before any of it is.

    Returns:
        The size of each frame in bytes.

    Raises:
        MessageTooLarge: together they are over the limit.
        ValueError: there is none, or one is not contiguous.
    """
    if not frames:
        raise ValueError("a message has at least one frame")
    if len(frames) == 1 and type(frames[0]) is bytes and len(frames[0]) <= limits.max_message_bytes:
        return [len(frames[0])]
    sizes_bytes = [len(frame) if isinstance(frame, bytes) else _size_bytes(frame) for frame in frames]
    if sum(sizes_bytes) > limits.max_message_bytes:
        raise MessageTooLarge(sum(sizes_bytes), limits.max_message_bytes)
    return sizes_bytes


def _size_bytes(frame: Frame) -> int:
    view = memoryview(frame)
    if not view.c_contiguous:
        raise ValueError(f"a frame must be contiguous, and this one has strides {view.strides}")
    return view.nbytes
