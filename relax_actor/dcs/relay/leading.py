"""The lead of a group of stores: forms it, broadcasts each new version once, forms the next when it broke.

One thread, in the store of the trainer's host. While there is no group, and for whoever has no seat, there is
the chain; `link`s are served beside all of this.
"""

import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

from relax_actor.dcs.manifest import PolicyCorruptError
from relax_actor.dcs.receiver import PolicyMissingError
from relax_actor.dcs.relay.carrier import IN_FLIGHT, Carrier, GroupBrokenError
from relax_actor.dcs.relay.group import KEY_BYTES, Desk, Kind, Seat, Word, signed
from relax_actor.dcs.relay.intake import Emit
from relax_actor.dcs.store import HostStore, VersionLease
from relax_actor.faults import point
from relax_actor.ids import Holder, PolicyVersion

BEAT_S: Final = 0.2
"""How often the lead speaks at least; who hears nothing for a carrier's deadline goes its own way."""

LOOK_S: Final = 0.02
"""How often it is looked whether a group is due."""

PIECE_BYTES: Final = 8 << 20
"""What one broadcast carries."""

Open = Callable[[], tuple[str, Any]]
"""Opens where a new group meets: what `Seat.rendezvous` says, and the store."""

Join = Callable[[Seat, Any], Carrier]
"""Joins a group; the store is rank 0's own. May raise `GroupBrokenError`."""


class Leader:
    """Leads the groups of a run's stores.

    Args:
        store: what there is on the trainer's host.
        me: the store's actor.
        names: all other stores, in the order of the chain.
        emit: where events go.
        open_meeting: see `Open`.
        join: see `Join`.
    """

    def __init__(
        self,
        store: HostStore,
        me: Holder,
        names: tuple[str, ...],
        emit: Emit,
        *,
        open_meeting: Open,
        join: Join,
    ) -> None:
        self._store, self._me, self._emit = store, me, emit
        self._open, self._join = open_meeting, join
        self._lock = threading.Lock()
        self._desk = Desk(names)
        self._seats: dict[Holder, Seat] = {}
        self._was_useful = False  # whether the group brought anything
        self._said = -1  # the newest version that the group has, or had its chance to get
        self._closed = threading.Event()

    def seat(self, holder: Holder, have: int) -> Seat | None:
        """Note that a store asks for a seat, and give it the one it has; any thread.

        Args:
            holder: who asks.
            have: the newest version it has, or refuses; -1 is none.
        """
        with self._lock:
            self._desk.ask(holder, have, self._newest(), time.monotonic())
            return self._seats.get(holder)

    @property
    def epoch(self) -> int:
        """The group's, 0 while there is none."""
        return self._desk.epoch if self._desk.seated else 0

    def run(self) -> None:
        """Lead until `close`."""
        with self._store.bell() as bell:
            while not self._closed.is_set():
                if members := self._due():
                    self._lead(members, bell)
                else:
                    self._closed.wait(LOOK_S)

    def close(self) -> None:
        """End soon; any thread."""
        self._closed.set()
        self._store.ring()

    # -- one group ------------------------------------------------------------------------------

    def _due(self) -> tuple[Holder, ...]:
        with self._lock:
            return self._desk.due(time.monotonic())

    def _lead(self, members: tuple[Holder, ...], bell: int) -> None:
        rendezvous, store = self._open()
        seat, self._was_useful = self._seat_all(members, rendezvous), False
        try:
            with closing(self._join(seat, store)) as carrier:
                names = [member.name for member in members]
                self._emit("relay_group_formed", epoch=seat.epoch, members=names)
                self._speak(carrier, seat, bell)
                self._was_useful = True
        except GroupBrokenError as error:
            self._emit("relay_group_lost", epoch=seat.epoch, reason=str(error))
        finally:
            with self._lock:
                self._seats.clear()
                self._desk.dissolve(time.monotonic(), was_useful=self._was_useful)

    def _seat_all(self, members: tuple[Holder, ...], rendezvous: str) -> Seat:
        with self._lock:
            self._said = self._desk.form(members)
            key = secrets.token_bytes(KEY_BYTES)
            seats = [
                Seat(
                    lead=self._me,
                    epoch=self._desk.epoch,
                    rank=rank,
                    size=len(members) + 1,
                    rendezvous=rendezvous,
                    key=key,
                )
                for rank in range(len(members) + 1)
            ]
            self._seats = dict(zip(members, seats[1:], strict=True))
        return seats[0]

    def _speak(self, carrier: Carrier, seat: Seat, bell: int) -> None:
        waits = select.poll()
        waits.register(bell, select.POLLIN)
        while not self._closed.is_set() and not self._is_outgrown():
            if self._newest() > self._said:
                self._broadcast(carrier, seat, PolicyVersion(self._newest()))
            elif waits.poll(BEAT_S * 1000):
                os.eventfd_read(bell)
            else:
                _say(carrier, Word(Kind.BEAT, seat.epoch).to_bytes(seat.key))
        _say(carrier, Word(Kind.END, seat.epoch).to_bytes(seat.key))

    def _is_outgrown(self) -> bool:
        with self._lock:
            return self._desk.is_outgrown(time.monotonic())

    # -- one version ----------------------------------------------------------------------------

    def _broadcast(self, carrier: Carrier, seat: Seat, version: PolicyVersion) -> None:
        self._said = version
        try:
            manifest = self._store.manifest(version)
        except (PolicyMissingError, PolicyCorruptError):
            return  # retired a moment ago, or damaged: the next one will be offered
        with closing(self._store.lease(version)) as lease:
            try:
                pieces = _pieces(lease, len(manifest.buckets))
            except (PolicyMissingError, PolicyCorruptError):
                return
            data = signed(seat.key, manifest.to_bytes())
            _say(carrier, Word(Kind.VERSION, seat.epoch, version, len(data)).to_bytes(seat.key))
            _say(carrier, data)
            started = 0
            for piece in pieces:
                carrier.begin(piece if not point("group_sent") else memoryview(bytes(len(piece))))
                started += 1
                if started >= IN_FLIGHT:
                    carrier.wait()
                    started -= 1
            for _ in range(started):
                carrier.wait()
        self._was_useful = True

    def _newest(self) -> int:
        newest = self._store.latest()
        return -1 if newest is None else newest


def _pieces(lease: VersionLease, buckets: int) -> Iterator[memoryview]:
    """Lease every bucket, then return an iterator over their pieces."""
    segments = [segment for index in range(buckets) if (segment := lease.bucket(index)) is not None]
    return (
        segment.buf[begin : begin + PIECE_BYTES]
        for segment in segments
        for begin in range(0, segment.nbytes, PIECE_BYTES)
    )


def _say(carrier: Carrier, data: bytes) -> None:
    carrier.begin(memoryview(data))
    carrier.wait()
