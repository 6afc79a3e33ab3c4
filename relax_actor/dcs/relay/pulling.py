"""The lower end of a link: pulls each new version once, straight into this host's shared memory.

One thread. It goes on with what is half here when the link changes, compares every bucket's checksum while
its bytes are still in the cache, and shows a version only once all of it is here. chain.py decides.
"""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, Protocol

import xxhash

from relax_actor.dcs.manifest import Manifest, PolicyCorruptError
from relax_actor.dcs.relay.chain import Chain, Haul, is_overtaken
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
from relax_actor.dcs.store import HostStore
from relax_actor.errors import ActorError
from relax_actor.ids import PolicyVersion
from transport.errors import TransportError
from transport.shm import SegmentSpaceError
from transport.stream import Stream

PIECE_BYTES: Final = 1 << 20
"""What is received before it is summed up: it fits the cache."""

Dial = Callable[[str, int], Stream]
"""Opens a stream to the store of this name, for the link of this epoch."""


class Emit(Protocol):
    """Where events go; see `telemetry.EventLog.emit`."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Append one event."""
        ...


class Puller:
    """Keeps a host's store up to date from the stores before it.

    Args:
        store: where versions go; it has a shelf.
        chain: whom to pull from.
        dial: how to reach a store; may raise `ActorError` or `TransportError`.
        emit: where events go.
        retry_s: how soon a store that nobody stands in for is tried again.
    """

    def __init__(self, store: HostStore, chain: Chain, dial: Dial, emit: Emit, *, retry_s: float) -> None:
        self._store, self._chain, self._dial, self._emit = store, chain, dial, emit
        self._retry_s = retry_s
        self._haul: Haul | None = None
        self._began = 0.0
        self._offered: dict[PolicyVersion, Offer] = {}
        self._newest_complete = -1
        self._refused: PolicyVersion | None = None
        self._skipped_the_last = False
        self._sum = xxhash.xxh3_64()  # of the bucket whose bytes come
        self._closed = threading.Event()
        self._stream: Stream | None = None
        self.upstream = ""

    def run(self) -> None:
        """Pull until `close`.

        Raises:
            PolicyBudgetError: a version cannot fit into the memory allowed.
        """
        while not self._closed.is_set():
            upstream = self._chain.upstream(time.monotonic())
            try:
                self._pull_from(upstream)
            except PolicyCorruptError as error:
                self._link_failed(upstream, error)
                if not self._chain.suspect(upstream, time.monotonic()):
                    self._refuse(error.version, error)
            except SegmentSpaceError as error:
                self._link_failed(upstream, error)
                if self._haul is not None:
                    self._refuse(self._haul.version, error)
            except (ActorError, TransportError, RelayError) as error:
                self._link_failed(upstream, error)
                if not self._chain.suspect(upstream, time.monotonic()):
                    self._closed.wait(self._retry_s)
        self._store.give_up()

    def close(self) -> None:
        """End soon; any thread."""
        self._closed.set()
        if (stream := self._stream) is not None:
            stream.end()

    # -- one link -------------------------------------------------------------------------------

    def _pull_from(self, upstream: str) -> None:
        epoch = self._chain.next_epoch()
        with closing(self._dial(upstream, epoch)) as stream:
            self._stream, self.upstream = stream, upstream
            self._offered.clear()
            self._newest_complete = -1
            if self._haul is not None:
                self._haul.relinked()
            stream.send(encode(Follow(epoch=epoch, have=self._store.latest())))
            self._emit("relay_linked", upstream=upstream, epoch=epoch)
            while not self._closed.is_set() and self._may_stay(upstream):
                self._hear(stream, upstream, epoch)

    def _may_stay(self, upstream: str) -> bool:
        """Go back to a nearer store that is trusted again, but not in the middle of a version."""
        return self._haul is not None or self._chain.upstream(time.monotonic()) == upstream

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
        elif isinstance(said, Gone) and self._haul is not None and self._haul.version == said.version:
            self._give_up("gone upstream")
        self._ask(stream, epoch)

    def _note(self, offer: Offer) -> None:
        if offer.manifest:
            self._offered = {offer.version: offer}  # an older one will not be begun any more
        if offer.is_complete:
            self._newest_complete = max(self._newest_complete, offer.version)
        haul = self._haul
        if haul is not None and is_overtaken(
            here_bytes=haul.here_bytes,
            total_bytes=haul.manifest.nbytes,
            newer_is_complete=self._newest_complete > haul.version,
            skipped_the_last=self._skipped_the_last,
        ):
            self._give_up(f"overtaken by version {self._newest_complete}")
            self._skipped_the_last = True

    def _ask(self, stream: Stream, epoch: int) -> None:
        if self._haul is None:
            self._begin()
        if self._haul is not None and self._haul.is_complete:  # a version of no buckets
            self._finish()
        elif self._haul is not None:
            for bucket in self._haul.wants():
                stream.send(encode(Want(epoch=epoch, version=self._haul.version, bucket=bucket)))

    # -- one version ----------------------------------------------------------------------------

    def _begin(self) -> None:
        have = max(-1 if seen is None else seen for seen in (self._store.latest(), self._refused))
        newer = [version for version in self._offered if version > have]
        if not newer:
            return
        manifest = Manifest.from_bytes(self._offered.pop(max(newer)).manifest, max(newer))
        self._store.begin(manifest)
        self._haul, self._began = Haul(manifest), time.monotonic()

    def _take(self, stream: Stream, upstream: str, chunk: Chunk, nbytes: int) -> None:
        haul, incoming = self._haul, self._store.incoming
        if haul is None or incoming is None or haul.version != chunk.version:
            _throw_away(stream, nbytes)  # of a version that was given up meanwhile
            return
        left_bytes = haul.left_bytes(chunk.bucket, chunk.offset)
        if not 0 < nbytes <= left_bytes:
            raise RelayError(
                upstream, f"sent {nbytes} bytes of bucket {chunk.bucket} from {chunk.offset}, out of turn"
            )
        target = incoming.target(chunk.bucket)[chunk.offset : chunk.offset + nbytes]
        self._receive(stream, target, is_first=chunk.offset == 0)
        haul.received(nbytes)
        if nbytes == left_bytes:
            self._check(haul, chunk.bucket)

    def _receive(self, stream: Stream, target: memoryview, *, is_first: bool) -> None:
        if is_first:
            self._sum.reset()
        for begin in range(0, len(target), PIECE_BYTES):
            piece = target[begin : begin + PIECE_BYTES]
            stream.receive_into(piece)
            self._sum.update(piece)

    def _check(self, haul: Haul, bucket: int) -> None:
        expected, found = haul.manifest.buckets[bucket].xxh3, self._sum.hexdigest()
        if found == expected:
            self._store.verified(bucket)
            haul.arrived()
            if haul.is_complete:
                self._finish()
            return
        self._emit("relay_damaged", version=haul.version, bucket=bucket, upstream=self.upstream)
        if not haul.damaged():
            raise PolicyCorruptError(haul.version, bucket, expected, found)

    def _finish(self) -> None:
        haul = self._haul
        if haul is None:
            return
        self._store.finish()
        self._haul = None
        self._chain.trust(self.upstream)
        self._skipped_the_last = False
        self._emit(
            "policy_relayed",
            version=haul.version,
            upstream=self.upstream,
            bytes=haul.manifest.nbytes,
            seconds=time.monotonic() - self._began,
        )

    def _give_up(self, reason: str) -> None:
        haul, self._haul = self._haul, None
        if haul is not None:
            self._store.give_up()
            self._emit("relay_skipped", version=haul.version, here_bytes=haul.here_bytes, reason=reason)

    def _refuse(self, version: PolicyVersion, error: PolicyCorruptError | SegmentSpaceError) -> None:
        """Never begin this version again: it is not what was published, or there is no room for it."""
        self._refused = version
        self._emit("policy_refused", version=version, reason=str(error))
        self._give_up("refused")

    def _link_failed(self, upstream: str, error: Exception) -> None:
        self._stream = None
        if not self._closed.is_set():
            self._emit("relay_link_lost", upstream=upstream, epoch=self._chain.epoch, reason=str(error))


def _throw_away(stream: Stream, nbytes: int) -> None:
    scratch = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    while nbytes > 0:
        stream.receive_into(scratch[:nbytes])
        nbytes -= len(scratch[:nbytes])
