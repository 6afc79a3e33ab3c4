"""The lower end of a link: pulls each new version once, straight into this host's shared memory.

One thread. It goes on with what is half here when the link changes, compares every bucket's checksum while
its bytes are still in the cache, and shows a version only once all of it is here. chain.py decides.
"""

import select
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from relax_actor.dcs.manifest import Manifest, PolicyCorruptError
from relax_actor.dcs.relay.chain import Chain, Haul, is_overtaken
from relax_actor.dcs.relay.intake import Emit, Intake
from relax_actor.dcs.relay.records import (
    Chunk,
    Follow,
    Gone,
    Offer,
    RelayError,
    Want,
    encode,
    read_down,
)
from relax_actor.dcs.relay.riding import ASK_S, FAILURES, Rider
from relax_actor.dcs.store import HostStore
from relax_actor.errors import ActorError
from relax_actor.ids import PolicyVersion
from transport.errors import TransportError
from transport.shm import SegmentSpaceError
from transport.stream import Stream

PIECE_BYTES: Final = 256 << 10
"""What is received before it is summed up: it is still in the core's own cache then."""

Dial = Callable[[str, int], Stream]
"""Opens a stream to the store of this name, for the link of this epoch."""


class Puller:
    """Keeps a host's store up to date from the stores before it.

    Args:
        store: where versions go; it has a shelf.
        intake: of that store.
        chain: whom to pull from.
        dial: how to reach a store; may raise `ActorError` or `TransportError`.
        emit: where events go.
        retry_s: how soon a store that nobody stands in for is tried again.
        rider: by whom versions come while there is a group; None: there never is one.
    """

    def __init__(
        self,
        store: HostStore,
        intake: Intake,
        chain: Chain,
        dial: Dial,
        emit: Emit,
        *,
        retry_s: float,
        rider: Rider | None = None,
    ) -> None:
        self._store, self._intake, self._chain, self._dial, self._emit = store, intake, chain, dial, emit
        self._retry_s, self.rider = retry_s, rider
        self._offered: dict[PolicyVersion, Offer] = {}
        self._newest_complete = -1
        self._skipped_the_last = False
        self._closed = threading.Event()
        self._stream: Stream | None = None
        self.upstream = ""

    def run(self) -> None:
        """Pull until `close`.

        Raises:
            PolicyBudgetError: a version cannot fit into the memory allowed.
        """
        while not self._closed.is_set():
            if self.rider is not None and self.rider.has_seat():
                self._ride(self.rider)
            else:
                self._pull(self._chain.upstream(time.monotonic()))
        self._intake.close()

    def close(self) -> None:
        """End soon; any thread."""
        self._closed.set()
        if self.rider is not None:
            self.rider.close()
        if (stream := self._stream) is not None:
            stream.end()

    # -- the two ways ---------------------------------------------------------------------------

    def _ride(self, rider: Rider) -> None:
        try:
            rider.ride()
        except PolicyCorruptError as error:
            self._emit("relay_group_lost", epoch=rider.last_epoch, reason=str(error))
            self._intake.refuse(error.version, error)
        except FAILURES as error:
            self._emit("relay_group_lost", epoch=rider.last_epoch, reason=str(error))
            # Which of the others stands still is not known here, and finding out would take a patience.
            self._chain.rely_on_first(time.monotonic())

    def _pull(self, upstream: str) -> None:
        try:
            self._pull_from(upstream)
        except PolicyCorruptError as error:
            self._link_failed(upstream, error)
            if not self._chain.suspect(upstream, time.monotonic()):
                self._intake.refuse(error.version, error)
        except SegmentSpaceError as error:
            self._link_failed(upstream, error)
            if self._intake.haul is not None:
                self._intake.refuse(self._intake.haul.version, error)
        except (ActorError, TransportError, RelayError) as error:
            self._link_failed(upstream, error)
            if not self._chain.suspect(upstream, time.monotonic()):
                self._closed.wait(self._retry_s)

    # -- one link -------------------------------------------------------------------------------

    def _pull_from(self, upstream: str) -> None:
        epoch = self._chain.next_epoch()
        with closing(self._dial(upstream, epoch)) as stream:
            self._stream, self.upstream = stream, upstream
            self._offered.clear()
            self._newest_complete = -1
            if self._intake.haul is not None:
                self._intake.haul.relinked()
            stream.send(encode(Follow(epoch=epoch, have=self._store.latest())))
            self._emit("relay_linked", upstream=upstream, epoch=epoch)
            while not self._closed.is_set() and self._may_stay(upstream):
                if self._is_spoken_to(stream, upstream):
                    self._hear(stream, upstream, epoch)

    def _may_stay(self, upstream: str) -> bool:
        """Go back to a nearer store that is trusted again, but not in the middle of a version."""
        if self._intake.haul is not None:
            return True
        return self._chain.upstream(time.monotonic()) == upstream and not self._has_seat()

    def _has_seat(self) -> bool:
        return self.rider is not None and self.rider.has_seat()

    def _is_spoken_to(self, stream: Stream, upstream: str) -> bool:
        """Wait for the store above; where there may be a seat meanwhile, for a while only."""
        if self.rider is None or self._intake.haul is not None:
            return True  # the stream's own patience is enough
        waits = select.poll()
        waits.register(stream.fileno(), select.POLLIN)
        deadline = time.monotonic() + stream.timeout_s
        while not waits.poll(ASK_S * 1000):
            if self._closed.is_set() or self._has_seat():
                return False
            if time.monotonic() > deadline:
                raise RelayError(upstream, f"said nothing for {stream.timeout_s:g} s")
        return True

    def _hear(self, stream: Stream, upstream: str, epoch: int) -> None:
        record, payload_bytes = stream.receive()
        said = read_down(record, upstream)
        if said.epoch != epoch:
            raise RelayError(upstream, f"said something of epoch {said.epoch} in epoch {epoch}")
        if isinstance(said, Chunk):
            self._take(stream, upstream, said, payload_bytes)
        elif payload_bytes:
            raise RelayError(upstream, f"sent {payload_bytes} bytes that belong to nothing")
        elif isinstance(said, Offer):
            self._note(said)
        elif isinstance(said, Gone) and (haul := self._intake.haul) and haul.version == said.version:
            self._intake.give_up("gone upstream")
        self._ask(stream, epoch)

    def _note(self, offer: Offer) -> None:
        if offer.manifest:
            self._offered = {offer.version: offer}  # an older one will not be begun any more
        if offer.is_complete:
            self._newest_complete = max(self._newest_complete, offer.version)
        haul = self._intake.haul
        if haul is not None and is_overtaken(
            here_bytes=haul.here_bytes,
            total_bytes=haul.manifest.nbytes,
            newer_is_complete=self._newest_complete > haul.version,
            skipped_the_last=self._skipped_the_last,
        ):
            self._intake.give_up(f"overtaken by version {self._newest_complete}")
            self._skipped_the_last = True

    def _ask(self, stream: Stream, epoch: int) -> None:
        if self._intake.haul is None:
            self._begin()
        if (haul := self._intake.haul) is None:
            return
        if haul.is_complete:  # a version of no buckets
            self._finish()
        for bucket in haul.wants():
            stream.send(encode(Want(epoch=epoch, version=haul.version, bucket=bucket)))

    # -- one version ----------------------------------------------------------------------------

    def _begin(self) -> None:
        have = self._intake.have()
        newer = [version for version in self._offered if version > have]
        if newer:
            newest = max(newer)
            self._intake.begin(Manifest.from_bytes(self._offered.pop(newest).manifest, newest))

    def _take(self, stream: Stream, upstream: str, chunk: Chunk, nbytes: int) -> None:
        haul = self._intake.haul
        if haul is None or haul.version != chunk.version:
            _throw_away(stream, nbytes)  # of a version that was given up meanwhile
            return
        left_bytes = haul.left_bytes(chunk.bucket, chunk.offset)
        if not 0 < nbytes <= left_bytes:
            raise RelayError(
                upstream, f"sent {nbytes} bytes of bucket {chunk.bucket} from {chunk.offset}, out of turn"
            )
        target = self._intake.target(chunk.bucket)[chunk.offset : chunk.offset + nbytes]
        self._receive(stream, target, is_first=chunk.offset == 0)
        haul.received(nbytes)
        if nbytes == left_bytes:
            self._check(haul, chunk.bucket)

    def _receive(self, stream: Stream, target: memoryview, *, is_first: bool) -> None:
        for begin in range(0, len(target), PIECE_BYTES):
            piece = target[begin : begin + PIECE_BYTES]
            stream.receive_into(piece)
            self._intake.sum_up(piece, is_first=is_first and begin == 0)

    def _check(self, haul: Haul, bucket: int) -> None:
        damage = self._intake.check(haul.manifest, bucket, self.upstream)
        if damage is None:
            haul.arrived()
            if haul.is_complete:
                self._finish()
        elif not haul.damaged():
            raise damage

    def _finish(self) -> None:
        self._intake.finish(self.upstream, "chain")
        self._chain.trust(self.upstream)
        self._skipped_the_last = False

    def _link_failed(self, upstream: str, error: Exception) -> None:
        self._stream = None
        if not self._closed.is_set():
            self._emit("relay_link_lost", upstream=upstream, epoch=self._chain.epoch, reason=str(error))


def _throw_away(stream: Stream, nbytes: int) -> None:
    scratch = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    while nbytes > 0:
        stream.receive_into(scratch[:nbytes])
        nbytes -= len(scratch[:nbytes])
