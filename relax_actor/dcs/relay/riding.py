"""A store's side of a group: it asks for a seat while idle, and takes in what the lead broadcasts.

Runs in the puller's thread: a store either rides in a group or pulls along the chain, and what it has of a
version by one way stays when it goes on by the other.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final, NamedTuple

from relax_actor.dcs.manifest import Manifest
from relax_actor.dcs.relay.carrier import IN_FLIGHT, Carrier, GroupBrokenError
from relax_actor.dcs.relay.group import WORD_BYTES, GroupWordError, Kind, Seat, Word, unsigned
from relax_actor.dcs.relay.intake import Intake
from relax_actor.dcs.relay.leading import PIECE_BYTES
from relax_actor.errors import ActorError, RelaxError
from relax_actor.faults import point
from transport.errors import TransportError
from transport.shm import SegmentSpaceError

ASK_S: Final = 0.1
"""How often a store that has nothing to do asks for a seat."""

Ask = Callable[[int], Seat | None]
"""Asks the lead for a seat, given the newest version here; may raise `ActorError` or `TransportError`."""

Join = Callable[[Seat], Carrier]
"""Joins a group; may raise `GroupBrokenError`."""


class _Piece(NamedTuple):
    bucket: int
    data: memoryview
    is_kept: bool  # else it is received only because the others receive it
    is_first: bool
    is_last: bool


class IncompleteError(RelaxError):
    """A version came by the group, but not as it was published: what is missing comes along the chain."""


class Rider:
    """Rides in the groups of one lead.

    Args:
        intake: where versions go.
        ask: see `Ask`.
        join: see `Join`.
        retry_s: how long a lead that did not answer is left alone.

    Attributes:
        epoch: of the group it rides in, 0 while in none.
        last_epoch: of the group it rode in last.
        lead: the name of whose group that was.
    """

    def __init__(self, intake: Intake, ask: Ask, join: Join, *, retry_s: float) -> None:
        self.epoch, self.last_epoch, self.lead = 0, 0, ""
        self._intake, self._ask, self._join = intake, ask, join
        self._retry_s = retry_s
        self._last = (0, 0)
        self._seat: Seat | None = None
        self._asks_at = 0.0
        self._closed = threading.Event()

    def has_seat(self) -> bool:
        """Whether there is a group to ride in; asks the lead now and then, while nothing is on its way."""
        now = time.monotonic()
        if self._seat is None and self._intake.haul is None and now >= self._asks_at:
            try:
                seat = self._ask(self._intake.have())
            except (ActorError, TransportError):
                self._asks_at = time.monotonic() + self._retry_s
                return False
            self._asks_at = now + ASK_S
            if seat is not None and seat.follows(self._last):
                self._seat = seat
        return self._seat is not None

    def ride(self) -> None:
        """Take in versions until the group ends in order, or `close`.

        Raises:
            GroupBrokenError: a store is lost, or late.
            GroupWordError: somebody else spoke.
            IncompleteError: some of a version was damaged on its way here.
            PolicyCorruptError: a manifest is damaged.
            PolicyBudgetError: a version cannot fit into the memory allowed.
        """
        seat, self._seat = self._seat, None
        if seat is None:
            return
        self._last, self.last_epoch, self.lead = seat.place, seat.epoch, seat.lead.name
        with closing(self._join(seat)) as carrier:
            self.epoch = seat.epoch
            try:
                while not self._closed.is_set() and self._heed(carrier, seat):
                    pass
            finally:
                self.epoch = 0
        self._asks_at = 0.0

    def close(self) -> None:
        """End soon; any thread."""
        self._closed.set()

    # -- inside ---------------------------------------------------------------------------------

    def _heed(self, carrier: Carrier, seat: Seat) -> bool:
        """Do what the lead's next word says; return whether there is more to come."""
        word = Word.from_bytes(_hear(carrier, WORD_BYTES), seat)
        if word.kind is Kind.VERSION:
            data = unsigned(seat.key, _hear(carrier, word.manifest_bytes))
            self._take(carrier, Manifest.from_bytes(data, word.version))
        return word.kind is not Kind.END

    def _take(self, carrier: Carrier, manifest: Manifest) -> None:
        intake = self._intake
        if intake.haul is not None and intake.haul.version < manifest.version:
            intake.give_up(f"overtaken by version {manifest.version}")
        if intake.haul is None and manifest.version > intake.have():
            intake.begin(manifest)
        if intake.haul is not None:
            intake.haul.relinked()
        self._receive(carrier, manifest)
        if intake.haul is None or intake.haul.version != manifest.version:
            return  # it was here before, was refused, or something newer comes
        if not intake.haul.is_complete:
            raise IncompleteError(f"not all of policy version {manifest.version} came as it was published")
        intake.finish(self.lead, "group")

    def _receive(self, carrier: Carrier, manifest: Manifest) -> None:
        under_way: deque[_Piece] = deque()
        for piece in self._pieces(manifest):
            carrier.begin(piece.data)
            under_way.append(piece)
            if len(under_way) >= IN_FLIGHT:
                self._land(carrier, manifest, under_way.popleft())
        while under_way:
            self._land(carrier, manifest, under_way.popleft())

    def _land(self, carrier: Carrier, manifest: Manifest, piece: _Piece) -> None:
        point("group_piece")
        carrier.wait()
        haul = self._intake.haul
        if not piece.is_kept or haul is None:
            return
        self._intake.sum_up(piece.data, is_first=piece.is_first)
        if piece.is_last and self._intake.check(manifest, piece.bucket, self.lead) is None:
            haul.came(piece.bucket)

    def _pieces(self, manifest: Manifest) -> Iterator[_Piece]:
        """Yield where each piece goes; what is here already, or not wanted, goes to nowhere."""
        nowhere = memoryview(
            bytearray(min(PIECE_BYTES, max((b.nbytes for b in manifest.buckets), default=0)))
        )
        for index, bucket in enumerate(manifest.buckets):
            target = self._target(manifest, index)
            for begin in range(0, bucket.nbytes, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, bucket.nbytes)
                data = nowhere[: end - begin] if target is None else target[begin:end]
                yield _Piece(index, data, target is not None, begin == 0, end == bucket.nbytes)

    def _target(self, manifest: Manifest, bucket: int) -> memoryview | None:
        haul = self._intake.haul
        if haul is None or haul.version != manifest.version or not haul.lacks(bucket):
            return None
        try:
            return self._intake.target(bucket)
        except SegmentSpaceError as error:
            self._intake.refuse(manifest.version, error)
            return None


def _hear(carrier: Carrier, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    carrier.begin(memoryview(data))
    carrier.wait()
    return bytes(data)


FAILURES: Final = (GroupBrokenError, GroupWordError, IncompleteError)
"""What ends a ride, and not the store."""
