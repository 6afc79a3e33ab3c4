"""The trainer's side of the DCS where the weights are on a GPU: publish, and go on.

    main thread   queue: pack a bucket on the GPU, fold it, copy it to page-locked memory; return
    GPU           does so on two streams of its own, beside the next step's forward and backward
    background    wait for each copy, xxh3; manifest, latest word, memory for the next version

The weights must not change before they are packed: `before_update` lets the next optimizer step wait for that
on the GPU, where it is long done. The main thread waits in one case only: the version before is not out yet,
that is, steps are shorter than publishing takes. Readers are never waited for.

With `buffers` the packed buckets stay on the GPU, in a snapshot that the host's store reads over NVLink
(snapshot.py). Without, or where all its buffers have readers, buckets go through a scratch of two.

Memory in the host is that of `keep` versions, as with the publisher for CPUs; one of them is always the next
one's, so `keep - 1` are there to read, and at least one.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from torch import Tensor

from relax_actor.dcs.cuda.device import DeviceError, Gpus, Mark
from relax_actor.dcs.cuda.fold import digest, fold
from relax_actor.dcs.cuda.job import Job, Room, Scratch
from relax_actor.dcs.cuda.packing import Named, Places, Plan
from relax_actor.dcs.cuda.pinned import PinnedPool
from relax_actor.dcs.cuda.snapshot import SnapshotWriter
from relax_actor.dcs.manifest import OWNER, Manifest, checksum
from relax_actor.dcs.shelf import Shelf
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.closing import Closing
from transport.shm import Segment, ShmSpace

HASHERS = 4
"""Threads that compute checksums: one is slower than the copy it waits for."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is out."""

    manifest: Manifest
    seconds: float  # from `publish` until readers see it
    copied_s: float  # of these, until the last bucket was in the host
    waited_s: float  # the main thread waited for the version before
    is_on_gpu: bool  # whether the GPU offers it, too


class CudaPublisher(Closing):
    """Offers policy versions whose weights are on one GPU. A run has one publisher at a time.

    Args:
        space: the run's shared memory.
        gpus: of this process.
        device: UUID of the GPU with the weights.
        dtype: what floating-point weights are published as; None is as they are.
        keep: versions of memory in the host, see above.
        bucket_bytes: the largest bucket.
        budget_bytes: the most that versions may take in the host; 0 is no limit.
        buffers: snapshots on the GPU, each as large as a version; 0 is none.
        on_published: told, in the background, of each version that is out.

    Raises:
        PublisherActiveError: another publisher of this run is alive.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        space: ShmSpace,
        gpus: Gpus,
        device: str,
        *,
        dtype: torch.dtype | None = None,
        keep: int = 2,
        bucket_bytes: int = 512 << 20,
        budget_bytes: int = 0,
        buffers: int = 2,
        on_published: Callable[[Published], None] = lambda _: None,
    ) -> None:
        self._space, self._gpus, self._device, self._dtype = space, gpus, device, dtype
        self._bucket_bytes, self._buffers, self._on_published = bucket_bytes, buffers, on_published
        self._shelf = Shelf(space, keep=keep, budget_bytes=budget_bytes)
        self._pinned = PinnedPool(space, gpus)
        self._packing, self._copying, self._reading = (gpus.lane(device) for _ in range(3))
        self._plan: Plan | None = None
        self._snapshot: SnapshotWriter | None = None
        self._scratch: Scratch | None = None
        self._places: dict[tuple[int, int], Places] = {}
        self._packed: Mark | None = None
        self._next: Room | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._hashers = ThreadPoolExecutor(HASHERS, "dcs-hash")  # the checksum lets other threads run
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="dcs-publish", daemon=True)
        self._thread.start()

    def latest(self) -> PolicyVersion | None:
        """Return the newest version that is out, None where there is none."""
        return self._shelf.newest()

    def publish(self, version: PolicyVersion, step: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Start to publish; what was queued on the current stream before is part of it.

        Args:
            version: higher than every version before.
            step: optimizer steps that led to it.
            weights: names and tensors on the GPU; they must not change before `before_update`.

        Raises:
            DeviceError: the GPU, or page-locking, has no room.
            SegmentSpaceError: shared memory is full.
            TypeError: an element type the DCS does not carry.
            ValueError: the version is not higher, or a name comes twice.
            RelaxError: whatever made the version before fail.
        """
        started = time.perf_counter()
        self.flush()
        waited_s = time.perf_counter() - started
        named = [(name, value.detach()) for name, value in weights]
        plan = self._planned(named)
        job = Job(version, step, plan=plan, room=self._room(version, plan), weights=named)
        job.started, job.waited_s = started, waited_s
        job.buffer = self._snapshot.take() if self._snapshot else None
        self._idle.clear()
        try:
            self._queue(job)
            self._jobs.put(job)
        except BaseException:
            job.give_up()
            self._idle.set()
            raise

    def before_update(self) -> None:
        """Let the current stream wait, on the GPU, until the weights are packed."""
        if self._packed is not None:
            self._gpus.current_waits(self._device, self._packed)
            self._packed = None

    def flush(self) -> None:
        """Wait until everything published is out.

        Raises:
            RelaxError: it failed, or whatever else went wrong with it.
        """
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Let another publisher follow; what is published stays, but for the GPU. Idempotent."""
        if self._thread.is_alive():
            self._idle.wait()
            self._jobs.put(None)
            self._thread.join()
            self._hashers.shutdown()
        self._forget_room()
        self._places.clear()
        self._free_gpu()
        self._pinned.close()
        self._shelf.close()

    # -- main thread ----------------------------------------------------------------------------

    def _planned(self, weights: Named) -> Plan:
        if self._plan is None or not self._plan.fits(weights):
            self._forget_room()
            self._free_gpu()
            self._plan = Plan(weights, self._bucket_bytes, self._dtype)
            self._snapshot = self._made_snapshot(self._plan.bucket_bytes)
        return self._plan

    def _made_snapshot(self, sizes: Sequence[int]) -> SnapshotWriter | None:
        """Make buffers if they are wanted and the GPU has room; without them the other routes still work."""
        if not self._buffers:
            return None
        try:
            return SnapshotWriter(self._space, self._gpus, self._device, sizes, buffers=self._buffers)
        except DeviceError:
            return None

    def _room(self, version: PolicyVersion, plan: Plan) -> Room:
        room, self._next = self._next, None
        if room is not None and room.staging.version == version:
            return room
        if room is not None:
            room.staging.give_up()
        return self._made_room(version, plan)

    def _queue(self, job: Job) -> None:
        """Give the GPU everything to do."""
        target = job.buffer or self._scratched(job.plan)
        self._packing.follow_current()
        for index, host in enumerate(job.room.data):
            turn = index % len(target.buckets)
            freed = target.freed[turn]
            if freed is not None:
                self._packing.wait(freed)
            bucket = target.buckets[turn][: job.plan.bucket_bytes[index]]
            with self._packing:
                self._placed(job.plan, index, bucket).pack(job.weights)
                job.folds.append(fold(bucket))
            self._packed = self._packing.mark()
            self._copying.wait(self._packed)
            with self._copying:
                host.copy_(bucket, non_blocking=True)
            copied = target.freed[turn] = self._copying.mark()
            job.copied.append(copied)

    def _placed(self, plan: Plan, index: int, bucket: Tensor) -> Places:
        key = (index, bucket.data_ptr())
        if key not in self._places:
            self._places[key] = plan.places(index, bucket)
        return self._places[key]

    def _scratched(self, plan: Plan) -> Scratch:
        if self._scratch is None:
            self._scratch = Scratch(self._gpus, self._device, max(plan.bucket_bytes))
        return self._scratch

    def _forget_room(self) -> None:
        room, self._next = self._next, None
        if room is not None:
            room.staging.roll_back()

    def _free_gpu(self) -> None:
        self._places.clear()
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.close()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.close()

    # -- background -----------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._finish(job)
            except BaseException as error:  # noqa: BLE001 - raised where the next version is published
                self._error = error
                if job.buffer is not None:
                    job.buffer.release()
            del job
            self._idle.set()

    def _finish(self, job: Job) -> None:
        with job.room.staging as staging:
            manifest, copied_s = self._settled(job)
            for index in range(len(manifest.buckets)):
                staging.filled(index)
            job.offer()  # first: whoever sees the word may look for it
            staging.commit(manifest, "publish")
        self._on_published(
            Published(
                manifest=manifest,
                seconds=time.perf_counter() - job.started,
                copied_s=copied_s,
                waited_s=job.waited_s,
                is_on_gpu=job.buffer is not None,
            )
        )
        self._prepare(PolicyVersion(job.version + 1), job.plan)

    def _settled(self, job: Job) -> tuple[Manifest, float]:
        """Wait for the copies and sum them up."""
        summed = list(self._hashers.map(_summed, job.copied, job.room.segments))
        with self._reading:
            folds = [digest(each) for each in torch.stack(job.folds).tolist()]
        manifest = job.plan.manifest(job.version, job.step, [xxh3 for xxh3, _ in summed], folds)
        return manifest, max(copied for _, copied in summed) - job.started

    def _prepare(self, version: PolicyVersion, plan: Plan) -> None:
        """Find and page-lock the next version's memory; what does not work now is tried again then."""
        try:
            self._next = self._made_room(version, plan)
        except Exception:  # noqa: BLE001 - the same is tried, and raised, when it is needed
            self._next = None

    def _made_room(self, version: PolicyVersion, plan: Plan) -> Room:
        staging = self._shelf.begin(version)
        try:
            segments = [staging.bucket(index, nbytes) for index, nbytes in enumerate(plan.bucket_bytes)]
            self._pinned.trim(OWNER)
            return Room(staging, segments, [self._pinned.get(segment.name).data() for segment in segments])
        except BaseException:
            staging.roll_back()
            raise


def _summed(copied: Mark, segment: Segment) -> tuple[str, float]:
    """Wait for a bucket and return its checksum, and when it was there."""
    copied.synchronize()
    there = time.perf_counter()
    point("publish_bucket")
    return checksum(segment.buf), there
