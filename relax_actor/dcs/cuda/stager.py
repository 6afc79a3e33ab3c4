"""The store's side of the GPU routes: it fills a ring of slots on a replica's GPU.

The store sees all GPUs of its host; a replica sees its own. So the store allocates the slots there, lets the
replica open them, and copies into them out of page-locked buckets, or over NVLink out of the trainer's
snapshot. The trainer takes no part in either, and page-locked memory, which makes a process die slowly, is in
the store only. Each transfer has a thread; a replica that dies or stands still costs that thread its patience
and the store nothing.

Invariant: a ring is lent again only after the page of the transfer before says that it has failed, or the
reader has said that it is done. A reader looks at the page after each copy out of a slot, so one that stood
still meanwhile never takes another transfer's bytes for its own.
"""

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
from torch import Tensor

from relax_actor.dcs.cuda.device import Gpus, Lane, Mark
from relax_actor.dcs.cuda.pinned import PinnedPool, PinnedSegment
from relax_actor.dcs.cuda.ring import PAGE_BYTES, Chunk, Failure, Move, Page, Ring, chunks
from relax_actor.dcs.cuda.slots import Slots, SlotStock
from relax_actor.dcs.cuda.snapshot import SnapshotLease, SnapshotReader
from relax_actor.dcs.cuda.staging import (
    ALIVE_LABEL,
    STAGE_OWNER,
    StageOffer,
    StageReply,
    StageRequest,
)
from relax_actor.dcs.manifest import OWNER, Manifest, PolicyCorruptError, bucket_label, checksum
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver, PolicySnapshot
from relax_actor.dcs.routes import Route
from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.shm import SegmentError, ShmSpace

SLOT_BYTES = 512 << 20
"""As much as a bucket has, so that most buckets go through in one piece."""

STALL_S = 10.0
"""A reader that is done with nothing for so long is given up."""

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


class Stager:
    """Brings versions to the GPUs of this host.

    Args:
        space: the run's shared memory.
        gpus: all GPUs of the host.
        incarnation: of the store; what an earlier one has left is removed.
        slot_bytes: the size of a slot, at most; larger buckets go through in pieces.
        slots: how many slots a ring has.
        stall_s: how long a reader may stand still.
        on_staged: told, in a thread of its own, of each transfer that has ended.
    """

    def __init__(
        self,
        space: ShmSpace,
        gpus: Gpus,
        *,
        incarnation: int = 1,
        slot_bytes: int = SLOT_BYTES,
        slots: int = 2,
        stall_s: float = STALL_S,
        on_staged: Callable[[Staged], None] = lambda _: None,
    ) -> None:
        self._space, self._incarnation, self._stall_s = space, incarnation, stall_s
        self._gpus, self._on_staged = gpus, on_staged
        space.sweep(STAGE_OWNER)
        self._alive_name = _made(space, incarnation, ALIVE_LABEL, 1)
        self._alive = space.try_lock(self._alive_name)
        self._stock = SlotStock(gpus, slot_bytes=slot_bytes, slots=slots)
        self._pinned = PinnedPool(space, gpus)
        self._snapshots = SnapshotReader(space, gpus)
        self._receiver = PolicyReceiver(space)
        self._verified: set[tuple[PolicyVersion, int]] = set()
        self._numbers = itertools.count()
        self._transfers: list[_Transfer] = []
        self._warmed: PolicyVersion | None = None
        self._warming: threading.Thread | None = None

    def open(self, request: StageRequest) -> StageReply:
        """Start a transfer; the reader finds its progress in the page of the offer. Quick, never raises."""
        try:
            return StageReply(offer=self._opened(request))
        except PolicyMissingError as error:
            return StageReply(refused=str(error), is_missing=True)
        except (RelaxError, SegmentError, RuntimeError) as error:  # torch's errors of a GPU are the last kind
            return StageReply(refused=f"{request.route} to {request.device}: {error}")

    def tick(self) -> None:
        """Page-lock what was published, unlock what is gone; to be called every now and then. Quick."""
        self._transfers = [transfer for transfer in self._transfers if transfer.is_alive()]
        latest = self._receiver.latest()
        if self._warming is not None and self._warming.is_alive():
            return
        if latest is not None and latest != self._warmed:
            self._warmed = latest
            self._warming = threading.Thread(target=self._warm, args=(latest,), name="dcs-pin", daemon=True)
            self._warming.start()
        elif not self._transfers:
            self._pinned.trim(OWNER)
            self._snapshots.forget_dead()
            self._verified = {key for key in self._verified if latest is None or key[0] >= latest}

    @property
    def transfers(self) -> int:
        """How many transfers are under way."""
        return sum(transfer.is_alive() for transfer in self._transfers)

    def close(self) -> None:
        """End all transfers and give all memory back."""
        for transfer in self._transfers:
            transfer.stop()
        if self._warming is not None:
            self._warming.join()
        self._stock.close()
        self._pinned.close()
        self._snapshots.close()
        if self._alive is not None:
            self._alive.close()
        self._space.sweep(STAGE_OWNER, self._incarnation)

    # -- inside ---------------------------------------------------------------------------------

    def _opened(self, request: StageRequest) -> StageOffer:
        with contextlib.ExitStack() as stack:
            source: _Source = (
                self._snapshot(request.version) if request.route is Route.CUDA_IPC else self._host(request.version)
            )
            stack.callback(source.close)
            sizes = [bucket.nbytes for bucket in source.manifest.buckets]
            slots = self._stock.take(request.device, max(sizes, default=1))
            stack.callback(self._stock.put_back, slots)
            name = _made(self._space, self._incarnation, f"t{next(self._numbers)}", PAGE_BYTES)
            stack.callback(self._space.unlink, name)
            page = Page(self._space.attach(name, writable=True))
            transfer = _Transfer(
                self._gpus, request, source, slots, page, is_read=lambda: self._is_read(name), stall_s=self._stall_s
            )
            transfer.start(stack.pop_all().close, self._on_staged)
        self._transfers.append(transfer)
        return StageOffer(
            page=name,
            alive=self._alive_name,
            handles=slots.handles,
            slot_bytes=slots.slot_bytes,
            manifest=source.manifest,
        )

    def _is_read(self, page: str) -> bool:
        """Whether somebody holds a lease on the page."""
        try:
            lock = self._space.try_lock(page)
        except SegmentError:
            return False
        if lock is None:
            return True
        lock.close()
        return False

    def _host(self, version: PolicyVersion) -> "_HostSource":
        snapshot = self._receiver.open(version)
        try:
            names = [
                self._space.name(OWNER, version, bucket_label(index))
                for index in range(len(snapshot.manifest.buckets))
            ]
            return _HostSource(snapshot, [self._pinned.get(name) for name in names], self._verified)
        except BaseException:
            snapshot.close()
            raise

    def _snapshot(self, version: PolicyVersion) -> "_SnapshotSource":
        manifest = self._receiver.manifest(version)
        if not all(bucket.fold for bucket in manifest.buckets):
            raise StageClosedError(f"version {version} was published without folds")
        lease = self._snapshots.lease(version)
        if lease is None:
            raise StageClosedError(f"no GPU offers version {version}")
        return _SnapshotSource(manifest, lease, self._snapshots)

    def _warm(self, version: PolicyVersion) -> None:
        with contextlib.suppress(RelaxError, SegmentError), self._receiver.open(version) as snapshot:
            for index in range(len(snapshot.manifest.buckets)):
                self._pinned.get(self._space.name(OWNER, version, bucket_label(index))).data()


class _Source(Protocol):
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


class _HostSource:
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
        if chunk.start == 0:
            self._verify(chunk.bucket)
        return self._segments[chunk.bucket].data()[chunk.start : chunk.start + chunk.nbytes]

    def close(self) -> None:
        self._snapshot.close()

    def _verify(self, bucket: int) -> None:
        """Compare a checksum here where the reader has none to compare on its GPU."""
        entry, key = self.manifest.buckets[bucket], (self.manifest.version, bucket)
        if entry.fold or key in self._verified:
            return
        found = checksum(memoryview(self._segments[bucket].data().numpy()))
        if found != entry.xxh3:
            raise PolicyCorruptError(self.manifest.version, bucket, entry.xxh3, found)
        self._verified.add(key)


class _SnapshotSource:
    """The trainer's snapshot under a lease."""

    def __init__(self, manifest: Manifest, lease: SnapshotLease, reader: SnapshotReader) -> None:
        self.manifest, self.device = manifest, lease.record.device
        self._lease, self._reader = lease, reader

    def chunk(self, chunk: Chunk) -> Tensor:
        nbytes = self.manifest.buckets[chunk.bucket].nbytes
        bucket = self._reader.bucket(self._lease.record, chunk.bucket, nbytes)
        return bucket[chunk.start : chunk.start + chunk.nbytes]

    def close(self) -> None:
        self._lease.close()


class _Transfer:
    """One version on its way into one ring."""

    def __init__(
        self,
        gpus: Gpus,
        request: StageRequest,
        source: _Source,
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
        with self._lane:
            slot[: chunk.nbytes].copy_(data, non_blocking=True)
        self._copying_since = self._copying_since if self._pending else time.perf_counter()
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
            return Failure(
                reason=str(error), bucket=error.bucket, expected=error.expected, found=error.found
            )
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


def _made(space: ShmSpace, incarnation: int, label: str, nbytes: int) -> str:
    with space.create(STAGE_OWNER, incarnation, label, nbytes) as segment:
        return segment.name
