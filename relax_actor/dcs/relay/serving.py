"""The upper end of a link: offers what is newer, sends buckets as they become whole, says that it is alive.

One thread a link, which never waits for the store below longer than the stream's time-out: a store that
stops costs this one a connection and, until the time-out, the memory of one version.
"""

import os
import select
import time
from collections import deque
from typing import Final

from relax_actor.dcs.manifest import PolicyCorruptError
from relax_actor.dcs.receiver import PolicyMissingError
from relax_actor.dcs.relay.records import Alive, Chunk, Follow, Gone, Offer, RelayError, Want, encode, read_up
from relax_actor.dcs.store import HostStore, VersionLease
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.stream import Stream

CHUNK_BYTES: Final = 8 << 20
"""What is sent between two looks at what the store below says, and at what is new."""


class ServingLink:
    """What one store below sees of this store.

    Args:
        store: what there is.
        downstream: whose link it is.
        epoch: the link's.
        alive_s: how often at least something is said.

    Attributes:
        is_closed: whether this end has ended it.
    """

    def __init__(self, store: HostStore, downstream: str, epoch: int, *, alive_s: float) -> None:
        self.downstream, self.epoch, self.is_closed = downstream, epoch, False
        self._store, self._alive_s = store, alive_s
        self._stream: Stream | None = None
        self._offered: tuple[PolicyVersion, bool] | None = None
        self._wanted: deque[Want] = deque()
        self._sent_bytes = 0  # of the first bucket wanted
        self._lease: VersionLease | None = None
        self._spoke = time.monotonic()

    def run(self, stream: Stream) -> None:
        """Serve until the link ends.

        Raises:
            StreamError: the stream ended or stood still.
            RelayError: the store below says what is not of this link, or what nobody says.
        """
        self._stream = stream
        try:
            with self._store.bell() as bell:
                self._follow(stream, bell)
        finally:
            self._stream = None
            self._let_go()

    @property
    def is_open(self) -> bool:
        """Whether the store below is connected."""
        return self._stream is not None and not self.is_closed

    def close(self) -> None:
        """End the link; any thread."""
        self.is_closed = True
        if (stream := self._stream) is not None:
            stream.end()

    # -- inside ---------------------------------------------------------------------------------

    def _follow(self, stream: Stream, bell: int) -> None:
        first = read_up(stream.receive()[0], self.downstream)
        if not isinstance(first, Follow) or first.epoch != self.epoch:
            raise RelayError(self.downstream, f"began with {first!r} in epoch {self.epoch}")
        self._offered = None if first.have is None else (first.have, True)
        waits = select.poll()
        waits.register(stream.fileno(), select.POLLIN)
        waits.register(bell, select.POLLIN)
        while not self.is_closed:
            self._offer(stream)
            is_busy = self._send_next(stream)
            for descriptor, _ in waits.poll(0 if is_busy else self._alive_s * 1000):
                if descriptor == bell:
                    os.eventfd_read(bell)
                else:
                    self._hear(stream)
            if time.monotonic() - self._spoke >= self._alive_s:
                self._say(stream, Alive(epoch=self.epoch))
                if not self._wanted:
                    self._let_go()

    def _hear(self, stream: Stream) -> None:
        said = read_up(stream.receive()[0], self.downstream)
        if not isinstance(said, Want) or said.epoch != self.epoch:
            raise RelayError(self.downstream, f"said {said!r} in epoch {self.epoch}")
        if self._wanted and self._wanted[0].version != said.version:
            self._forget_wants()
        self._wanted.append(said)

    def _offer(self, stream: Stream) -> None:
        newest = self._store.newest()
        if newest is None or (self._offered is not None and newest <= self._offered):
            return
        version, is_complete = newest
        try:
            is_new = self._offered is None or version != self._offered[0]
            manifest = self._store.manifest(version).to_bytes() if is_new else b""
        except (PolicyMissingError, PolicyCorruptError):
            return  # given up a moment ago, or damaged: the next one will be offered
        point("relay_offer")
        offer = Offer(epoch=self.epoch, version=version, is_complete=is_complete, manifest=manifest)
        self._say(stream, offer)
        self._offered = newest

    def _send_next(self, stream: Stream) -> bool:
        """Send a chunk of the first bucket wanted; return whether more can be sent at once."""
        if not self._wanted:
            return False
        want = self._wanted[0]
        try:
            segment = self._leased(want.version).bucket(want.bucket)
        except (PolicyMissingError, PolicyCorruptError):
            self._forget_wants()
            self._say(stream, Gone(epoch=self.epoch, version=want.version))
            if self._store.newest() != (want.version, True):  # else it is damaged here
                self._offered = None  # should it come again, it is offered again
            return True
        if segment is None:
            return False
        self._send_chunk(stream, want, segment.buf)
        return True

    def _send_chunk(self, stream: Stream, want: Want, data: memoryview) -> None:
        begin = self._sent_bytes
        chunk = data[begin : begin + CHUNK_BYTES]
        is_lost = point("relay_chunk")
        record = Chunk(epoch=self.epoch, version=want.version, bucket=want.bucket, offset=begin)
        stream.send(encode(record), chunk if not is_lost else memoryview(bytes(len(chunk))))
        self._spoke = time.monotonic()
        self._sent_bytes += len(chunk)
        if self._sent_bytes >= len(data):
            self._wanted.popleft()
            self._sent_bytes = 0

    def _forget_wants(self) -> None:
        self._wanted.clear()
        self._sent_bytes = 0

    def _leased(self, version: PolicyVersion) -> VersionLease:
        if self._lease is None or self._lease.version != version:
            self._let_go()
            self._lease = self._store.lease(version)
        return self._lease

    def _let_go(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _say(self, stream: Stream, record: Offer | Gone | Alive) -> None:
        stream.send(encode(record))
        self._spoke = time.monotonic()
