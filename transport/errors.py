"""What can go wrong on the wire. Facts are attributes; the text is built from them.

The names of states (`ChannelFull`, as in `asyncio.QueueFull`) carry no `Error`: meeting one is part of
ordinary traffic, and what to do about it is the sender's decision.
"""


class TransportError(Exception):
    """Base of every error that `transport` raises on purpose."""


class AddressError(TransportError, ValueError):
    """An address cannot be read, or cannot be listened on.

    Args:
        address: the address as it was given.
        fact: what is wrong with it.
        hint: what to do about it, or nothing.
    """

    def __init__(self, address: str, fact: str, hint: str = "") -> None:
        self.address, self.fact, self.hint = address, fact, hint
        super().__init__(f"address `{address}` {fact}" + (f"\n\nhint: {hint}" if hint else ""))


class KeysError(TransportError):
    """The keys of a run cannot be used.

    Args:
        source: where they came from, or what they were wanted for.
        fact: what is wrong with them.
    """

    def __init__(self, source: str, fact: str) -> None:
        self.source, self.fact = source, fact
        super().__init__(f"keys of {source}: {fact}")


class ChannelFull(TransportError):  # noqa: N818 - a state, as asyncio.QueueFull
    """The message was refused: too many wait for this receiver already. Nothing was sent.

    Args:
        receiver: who does not keep up: an address or a peer.
        high_water_messages: how many may wait on each side.
    """

    def __init__(self, receiver: str, high_water_messages: int) -> None:
        self.receiver, self.high_water_messages = receiver, high_water_messages
        super().__init__(
            f"{receiver} does not keep up: its {high_water_messages} waiting messages are the limit"
        )


class PeerUnreachable(TransportError):  # noqa: N818 - a state, as ChannelFull
    """No connection of this peer is open. Nothing was sent.

    Args:
        peer: the peer's identity.
        address: the listener it was looked for at.
    """

    def __init__(self, peer: bytes, address: str) -> None:
        self.peer, self.address = peer, address
        super().__init__(f"no peer {peer!r} is connected to {address}")


class MessageTooLarge(TransportError):  # noqa: N818 - a state, as ChannelFull
    """The frames of one message are larger than the limit. Nothing was sent.

    Args:
        message_bytes: all frames together.
        limit_bytes: what they may be at most.
    """

    def __init__(self, message_bytes: int, limit_bytes: int) -> None:
        self.message_bytes, self.limit_bytes = message_bytes, limit_bytes
        super().__init__(
            f"a message of {message_bytes:,} bytes is over the limit of {limit_bytes:,}"
            "\n\nhint: large arrays belong into shared memory, and only their refs into messages"
        )


class ChannelClosed(TransportError):  # noqa: N818 - a state, as ChannelFull
    """This end was closed before.

    Args:
        address: the address it was connected to, or listened on.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(f"the channel of {address} is closed")


class CodecError(TransportError):
    """A value cannot be written to the wire, or bytes from the wire are no such value.

    Args:
        what: the record or value that was being written or read.
        fact: what was expected and what was found.
        path: where inside of it; `$` is the whole.
    """

    def __init__(self, what: str, fact: str, path: str = "$") -> None:
        self.what, self.fact, self.path = what, fact, path
        super().__init__(f"{what} at `{path}`: {fact}")
