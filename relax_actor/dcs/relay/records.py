"""What two neighbouring stores say on their stream; up is towards the trainer.

The one below says `Follow` once and then asks for buckets; the one above offers versions and sends. Every
record bears the link's epoch, so what was sent on an older link is refused. Records grow at the end only.
"""

from typing import Final, TypeVar

import msgspec

from relax_actor.errors import RelaxError
from relax_actor.ids import PolicyVersion

R = TypeVar("R")


class RelayError(RelaxError):
    """A link between two stores is of no use any more.

    Args:
        peer: the store at its other end.
        fact: what happened.
    """

    def __init__(self, peer: str, fact: str) -> None:
        self.peer, self.fact = peer, fact
        super().__init__(f"the link with {peer} {fact}")


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all of it."""

    epoch: int


class Follow(Said, frozen=True, kw_only=True, tag="follow"):
    """Up: tell me of every version newer than this."""

    have: PolicyVersion | None


class Want(Said, frozen=True, kw_only=True, tag="want"):
    """Up: send this bucket, as soon as you have it; forget what I wanted of another version.

    Wants are answered in order.
    """

    version: PolicyVersion
    bucket: int


class Offer(Said, frozen=True, kw_only=True, tag="offer"):
    """Down: this version is here, or on its way to here; said again once it is complete."""

    version: PolicyVersion
    is_complete: bool
    manifest: bytes = b""  # as in shared memory; empty when it is said again


class Chunk(Said, frozen=True, kw_only=True, tag="chunk"):
    """Down: the payload is the next bytes of this bucket."""

    version: PolicyVersion
    bucket: int
    offset: int


class Gone(Said, frozen=True, kw_only=True, tag="gone"):
    """Down: this version is not here any more; nothing of it will follow."""

    version: PolicyVersion


class Alive(Said, frozen=True, kw_only=True, tag="alive"):
    """Down: there is nothing to send just now."""


Up = Follow | Want
Down = Offer | Chunk | Gone | Alive

encode: Final = msgspec.msgpack.Encoder().encode
_UP: Final = msgspec.msgpack.Decoder(Up)
_DOWN: Final = msgspec.msgpack.Decoder(Down)


def read_up(data: bytes, peer: str) -> Up:
    """Read what the store below said.

    Raises:
        RelayError: it is none of that.
    """
    return _read(_UP, data, peer)


def read_down(data: bytes, peer: str) -> Down:
    """Read what the store above said.

    Raises:
        RelayError: it is none of that.
    """
    return _read(_DOWN, data, peer)


def _read(decoder: "msgspec.msgpack.Decoder[R]", data: bytes, peer: str) -> R:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RelayError(peer, f"carried what nobody says: {error}") from error
