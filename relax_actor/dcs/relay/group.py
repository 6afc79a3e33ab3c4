"""Who is in a group of stores, when a group is formed, and what is said in one: decisions without I/O.

Store-0 leads: it broadcasts every new version to all others at once. A store asks for a seat while it has
nothing to do: it has pulled along the chain what there was. So the lead knows who is there and runs, and a
store that stands still is in no group for longer than one deadline.

Invariants
    1. A group has an epoch, higher than that of every group before it of the same lead; a later incarnation
       of the lead is later than all of them. A seat of an older one is not taken.
    2. Every word says its group's epoch and is signed with the group's key, which travels by the run's
       encrypted messages as the seat does: what a stranger says on an open port is nobody's word.
    3. A group never changes: who is lost ends it, and who is new gets a seat in the next one.
"""

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Self

import msgspec

from relax_actor.ids import Holder, PolicyVersion

GATHER_S: Final = 0.3
"""How long a group that is to be waits for all stores of the run; those that have asked by then form it."""

FRESH_S: Final = 1.0
"""How long somebody who asked counts as being there."""

FIRST_REST_S: Final = 0.5
LONGEST_REST_S: Final = 30.0
"""No group is formed for so long after one that was of no use: each further one in a row doubles it."""

KEY_BYTES: Final = 32


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a group, for one incarnation of one store."""

    lead: Holder
    epoch: int
    rank: int  # 0 is the lead
    size: int
    rendezvous: str  # an `init_method`
    key: bytes

    def follows(self, last: tuple[int, int]) -> bool:
        """Whether it is of a later group than `last`: the lead's incarnation and the epoch."""
        return self.place > last

    @property
    def place(self) -> tuple[int, int]:
        """The lead's incarnation and the epoch, by which groups are ordered."""
        return self.lead.incarnation, self.epoch


class _Asked(NamedTuple):
    holder: Holder
    have: int
    is_up_to_date: bool
    since: float
    last: float


class Desk:
    """Decides when to form a group, and of whom.

    Args:
        names: all stores but the lead, in the order of the chain.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.epoch = 0
        self.seated: tuple[Holder, ...] = ()
        self._names = tuple(names)
        self._asked: dict[str, _Asked] = {}
        self._ended = 0.0  # when the last group did
        self._useless = 0  # groups in a row
        self._rests_until = 0.0

    def ask(self, holder: Holder, have: int, newest: int, now: float) -> None:
        """Note that a store asks for a seat.

        Args:
            holder: who asks; one that is seated is not noted.
            have: the newest version it has, or refuses; -1 is none.
            newest: the newest version that the lead has, -1 is none.
            now: the time.
        """
        # Who has a seat asks only to be told; were it noted, the next group would wait for it in vain.
        if holder.name in self._names and holder not in self.seated:
            known = self._asked.get(holder.name)
            is_here = known is not None and known.holder == holder and self._is_fresh(known, now)
            since = known.since if known is not None and is_here else now
            self._asked[holder.name] = _Asked(holder, have, have >= newest, since, now)

    def due(self, now: float) -> tuple[Holder, ...]:
        """Return whom a group is to be formed of now, in the order of the chain; empty for not now."""
        ready = self._ready(now)
        if not ready or self.seated or now < self._rests_until:
            return ()
        waits_since = max(self._ended, min(each.since for each in ready))
        if len(ready) < len(self._names) and now - waits_since < GATHER_S:
            return ()
        return tuple(each.holder for each in ready)

    def is_outgrown(self, now: float) -> bool:
        """Whether somebody who is up to date has no seat, so that the next group is to be formed."""
        return bool(self.seated) and any(each.holder not in self.seated for each in self._ready(now))

    def form(self, members: Sequence[Holder]) -> int:
        """Seat a group.

        Returns:
            The newest version that all of it have.
        """
        self.epoch += 1
        self.seated = tuple(members)
        return min(self._asked.pop(member.name).have for member in members)

    def dissolve(self, now: float, *, was_useful: bool) -> None:
        """The group is no more.

        Args:
            now: the time.
            was_useful: whether a version came by it, or it ended in order.
        """
        self.seated, self._ended = (), now
        self._useless = 0 if was_useful else self._useless + 1
        if self._useless:
            self._rests_until = now + min(FIRST_REST_S * 2.0 ** (self._useless - 1), LONGEST_REST_S)

    def _ready(self, now: float) -> list[_Asked]:
        asked = [self._asked[name] for name in self._names if name in self._asked]
        return [each for each in asked if each.is_up_to_date and self._is_fresh(each, now)]

    def _is_fresh(self, asked: _Asked, now: float) -> bool:
        return now - asked.last < FRESH_S


class Kind(IntEnum):
    """What a lead says."""

    BEAT = 1  # the group is there
    VERSION = 2  # a version follows: its manifest, then its buckets
    END = 3  # the group ends in order: ask for a seat in the next


_WORD: Final = struct.Struct("<4sBQqQ")  # magic, kind, epoch, version, bytes of the manifest
_MAGIC: Final = b"rxgr"
_MAC: Final = "sha256"
_MAC_BYTES: Final = 32
WORD_BYTES: Final = _WORD.size + _MAC_BYTES


class GroupWordError(Exception):
    """What was received is nothing that the lead of this group said."""


class Word(NamedTuple):
    """What the lead says before anything else comes."""

    kind: Kind
    epoch: int
    version: PolicyVersion = PolicyVersion(-1)
    manifest_bytes: int = 0

    def to_bytes(self, key: bytes) -> bytes:
        """Return `WORD_BYTES` bytes, signed."""
        said = _WORD.pack(_MAGIC, self.kind, self.epoch, self.version, self.manifest_bytes)
        return said + sign(key, said)

    @classmethod
    def from_bytes(cls, data: bytes, seat: Seat) -> Self:
        """Read what the lead of this seat's group said.

        Raises:
            GroupWordError: it did not say that, or said it in another epoch.
        """
        said = data[: _WORD.size]
        if len(data) != WORD_BYTES or not hmac.compare_digest(sign(seat.key, said), data[_WORD.size :]):
            raise GroupWordError("somebody who does not have the group's key spoke")
        _, kind, epoch, version, manifest_bytes = _WORD.unpack(said)
        if epoch != seat.epoch:
            raise GroupWordError(f"something of epoch {epoch} was said in epoch {seat.epoch}")
        return cls(Kind(kind), epoch, PolicyVersion(version), manifest_bytes)


def sign(key: bytes, data: bytes) -> bytes:
    """Return the HMAC-SHA256 of `data`, 32 bytes."""
    return hmac.digest(key, data, _MAC)


def signed(key: bytes, manifest: bytes) -> bytes:
    """Return a manifest as it is broadcast, with its signature in front."""
    return sign(key, manifest) + manifest


def unsigned(key: bytes, data: bytes) -> bytes:
    """Return the manifest of what `signed` made.

    Raises:
        GroupWordError: it was altered, or signed by a stranger.
    """
    if not hmac.compare_digest(sign(key, data[_MAC_BYTES:]), data[:_MAC_BYTES]):
        raise GroupWordError("a manifest came that the lead did not sign")
    return data[_MAC_BYTES:]
