"""One policy version on its way into one ring: where its bytes come from, and the thread that moves them."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
from torch import Tensor

from relax_actor.dcs.cuda.device import Gpus, Lane, Mark
from relax_actor.dcs.cuda.pinned import PinnedSegment
from relax_actor.dcs.cuda.ring import Chunk, Failure, Move, Page, Ring, chunks
from relax_actor.dcs.cuda.slots import Slots
from relax_actor.dcs.cuda.snapshot import SnapshotLease, SnapshotReader
from relax_actor.dcs.cuda.staging import StageRequest
from relax_actor.dcs.manifest import Manifest, PolicyCorruptError, checksum
from relax_actor.dcs.receiver import PolicySnapshot
from relax_actor.dcs.routes import Route
from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion

_LOOK_S = 0.02  # how often a thread looks whether its reader is alive
_NAP_S = 20e-6


class StageClosedError(RelaxError):
    """A GPU route cannot be taken now."""


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """How a transfer ended."""

    version: PolicyVersion
    route: Route
    device: str  # UUID of the replica's GPU
    nbytes: int  # that lay ready
    seconds: float
    copying_s: float  # of these, while at least one chunk was on its way
    failure: str  # empty where the reader has all of it


class Source(Protocol):
    """Where a transfer's bytes come from."""

    manifest: Manifest

    def chunk(self, chunk: Chunk) -> Tensor:
        """Return its bytes, uint8 [chunk.nbytes]."""
        ...

    @property
    def device(self) -> str:
        """UUID of the GPU that copies, or nothing: then it is the one copied to."""
        ...

    def close(self) -> None:
        """Give its lease back."""
        ...


class HostSource:
    """Page-locked buckets under a lease."""

    device = ""

    def __init__(
        self,
        snapshot: PolicySnapshot,
        segments: list[PinnedSegment],
        verified: set[tuple[PolicyVersion, int]],
    ) -> None:
        self.manifest = snapshot.manifest
        self._snapshot, self._segments, self._verified = snapshot, segments, verified

    def chunk(self, chunk: Chunk) -> Tensor:
        """Return its bytes in the host; raises `PolicyCorruptError`."""
        if chunk.start == 0:
            self._verify(chunk.bucket)
        return self._segments[chunk.bucket].data()[chunk.start : chunk.start + chunk.nbytes]

    def close(self) -> None:
        """Give the lease on the buckets back."""
        self._snapshot.close()

    def _verify(self, bucket: int) -> None:
        """Compare a checksum here where the reader has none to compare on its GPU."""
        entry, key = self.manifest.buckets[bucket], (self.manifest.version, bucket)
        if entry.fold or key in self._verified:
            return
        found = checksum(self._segments[bucket].buf)
        if found != entry.xxh3:
            raise PolicyCorruptError(self.manifest.version, bucket, entry.xxh3, found)
        self._verified.add(key)


class SnapshotSource:
    """The trainer's snapshot under a lease."""

    def __init__(self, manifest: Manifest, lease: SnapshotLease, reader: SnapshotReader) -> None:
        self.manifest, self.device = manifest, lease.record.device
        self._lease, self._reader = lease, reader

    def chunk(self, chunk: Chunk) -> Tensor:
        """Return its bytes on the trainer's GPU; raises `DeviceError`."""
        nbytes = self.manifest.buckets[chunk.bucket].nbytes
        bucket = self._reader.bucket(self._lease.record, chunk.bucket, nbytes)
        return bucket[chunk.start : chunk.start + chunk.nbytes]

    def close(self) -> None:
        """Give the lease on the buffer back."""
        self._lease.close()


class Transfer:
    """One version on its way into one ring."""

    def __init__(
        self,
        gpus: Gpus,
        request: StageRequest,
        source: Source,
        slots: Slots,
        page: Page,
        *,
        is_read: Callable[[], bool],
        stall_s: float,
    ) -> None:
        self._request, self._source, self._slots, self._page = request, source, slots, page
        self._is_read, self._stall_s = is_read, stall_s
        sizes = [bucket.nbytes for bucket in source.manifest.buckets]
        self._chunks = list(chunks(sizes, slots.slot_bytes))
        self._ring = Ring(len(self._chunks), len(slots))
        self._lane: Lane = gpus.lane(source.device or request.device)
        self._pending: deque[Mark] = deque()
        self._stopping = threading.Event()
        self._copying_since = self._copying_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self, clean_up: Callable[[], None], on_end: Callable[[Staged], None]) -> None:
        """Begin, in a thread of its own; `clean_up` follows the end, whatever it is."""
        arguments = (clean_up, on_end)
        self._thread = threading.Thread(target=self._run, args=arguments, name="dcs-stage", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether it is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End it."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, clean_up: Callable[[], None], on_end: Callable[[Staged], None]) -> None:
        started, failure = time.perf_counter(), None
        try:
            self._move_all()
        except Exception as error:  # noqa: BLE001 - the reader is told, takes another way, and its log says why
            failure = self._failure(error)
            self._page.fail(failure)
        with contextlib.suppress(Exception):  # a GPU that is lost cannot be waited for
            self._settle()
        self._page.close()
        clean_up()
        on_end(
            Staged(
                version=self._request.version,
                route=self._request.route,
                device=self._request.device,
                nbytes=sum(chunk.nbytes for chunk in self._chunks[: self._ring.filled]),
                seconds=time.perf_counter() - started,
                copying_s=self._copying_s,
                failure=failure.reason if failure else "",
            )
        )

    def _move_all(self) -> None:
        patience = _Patience(self._is_read, self._stall_s)
        while not self._stopping.is_set():
            done_with = self._page.done_with
            match self._ring.move(done_with):
                case Move.END:
                    return
                case Move.LAUNCH:
                    self._launch()
                    self._announce()
                case Move.ANNOUNCE if self._announce():
                    continue
                case _:
                    patience.spend(done_with)
                    time.sleep(_NAP_S)
        raise StageClosedError("the store stops")

    def _launch(self) -> None:
        chunk = self._chunks[self._ring.launched]
        data = self._source.chunk(chunk)
        slot = self._slots[self._ring.launched % len(self._slots)]
        self._copying_since = self._copying_since if self._pending else time.perf_counter()
        with self._lane:
            slot[: chunk.nbytes].copy_(data, non_blocking=True)
        self._pending.append(self._lane.mark())
        self._ring.launched += 1
        point("stage_chunk")

    def _announce(self) -> bool:
        """Say that the oldest chunk lies ready if it does."""
        if not self._pending or not self._pending[0].is_done():
            return False
        self._pending.popleft()
        if not self._pending:
            self._copying_s += time.perf_counter() - self._copying_since
        self._ring.filled += 1
        self._page.filled = self._ring.filled
        return True

    def _settle(self) -> None:
        """Wait for what was launched, so that the slots are nobody's."""
        while self._pending:
            self._pending.popleft().synchronize()

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, PolicyCorruptError):
            return Failure(reason=str(error), bucket=error.bucket, expected=error.expected, found=error.found)
        number = min(self._ring.launched, len(self._chunks) - 1)
        nbytes = self._chunks[number].nbytes
        where = f"chunk {number} of {len(self._chunks)}, {nbytes} bytes, to {self._request.device}"
        return Failure(reason=f"{where}: {type(error).__name__}: {error}")


class _Patience:
    """How long to wait for a reader: while it lives, and gets done with something now and then."""

    def __init__(self, is_read: Callable[[], bool], stall_s: float) -> None:
        self._is_read, self._stall_s = is_read, stall_s
        self._done_with = 0
        self._until_s = time.monotonic() + stall_s
        self._next_look_s = time.monotonic() + _LOOK_S
        self._was_read = False

    def spend(self, done_with: int) -> None:
        """Wait on, or not.

        Raises:
            StageClosedError: the reader is gone, or stands still.
        """
        now = time.monotonic()
        if done_with != self._done_with:
            self._done_with, self._until_s = done_with, now + self._stall_s
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        is_read = self._is_read()
        if self._was_read and not is_read:  # before its first look at the page nobody holds it
            raise StageClosedError("the reader is gone")
        self._was_read = is_read
        if now >= self._until_s:
            raise StageClosedError(f"the reader stood still for {self._stall_s} s")
