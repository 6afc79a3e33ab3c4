"""The trainer's side of the DCS: policy versions, written once into shared memory.

Design
    There is no process in between. On one host the kernel does what a store would do: a file name makes a
    version visible, a shared lock (flock) is a reader's lease, and both outlive the publisher. A version is
    written bucket by bucket, summed up in a manifest, made visible by giving the manifest its final name,
    and then announced in the word that readers watch:

        bucket 0 .. n-1  ->  manifest.staging  ->  manifest  ->  latest word

    The buckets of the version that falls out of `keep` are rewritten in place: their pages are warm. With
    the default `keep=2` memory is two versions, and while one is written the other is there to read.

    Each bucket is a `.safetensors` file as it lies (header.py), so a stock loader can read a version.

Invariants
    1. A version is visible exactly while its manifest has its final name, and then all its bytes are there.
    2. A visible version's bytes never change. Before a bucket is rewritten its manifest is unlinked, and
       then its lock is taken; a reader locks the buckets and then looks whether the manifest is still
       there. Whichever comes second gives way.
    3. The publisher waits for nobody. A bucket that has readers is let go of and a new one is made; a
       stopped reader costs memory, a dead one nothing.
    4. Versions never go back, also from publisher to publisher: the next one is higher than the newest
       complete one and than the word.
    5. Whenever a publisher dies, the next one removes what has no manifest and goes on.

Refused
    One file per tensor (thousands of names); a lease table in shared memory (a dead reader would need
    somebody to notice); reference counts (the same); waiting for readers with a time-out (a stopped rollout
    would hold up the trainer); a checksum per tensor (a bucket is what is sent again).
"""

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from relax_actor.dcs.latest import LatestWriter
from relax_actor.dcs.layout import Bucket, Placed, fill_buckets, write
from relax_actor.dcs.manifest import (
    MANIFEST_LABEL,
    OWNER,
    STAGING_LABEL,
    BucketEntry,
    Manifest,
    PolicyCorruptError,
    TensorEntry,
    bucket_label,
    checksum,
)
from relax_actor.dcs.pool import SegmentPool
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.shm import Segment, SegmentLock, SegmentMissingError, SegmentSpaceError, ShmSpace, parse_name

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterable[tuple[str, "npt.NDArray[Any] | Tensor"]]


class PolicyPublisher:
    """Offers policy versions to the readers of one host. A run has one at a time.

    Making one removes what a dead publisher left half-written and keeps what it completed.

    Args:
        space: the run's shared memory.
        keep: how many versions stay readable; while one is written, one less, but always the newest.
        bucket_bytes: the largest bucket, its head included; a single larger tensor has one to itself.

    Raises:
        PublisherActiveError: another publisher of this run is alive.
        ValueError: `keep` or `bucket_bytes` is below 1.
    """

    def __init__(self, space: ShmSpace, *, keep: int = 2, bucket_bytes: int = 512 << 20) -> None:
        if keep < 1 or bucket_bytes < 1:
            raise ValueError(f"keep={keep} and bucket_bytes={bucket_bytes} must be at least 1")
        self._space = space
        self._keep = keep
        self._bucket_bytes = bucket_bytes
        self._latest = LatestWriter(space)
        self._pool = SegmentPool(space)
        self._complete = _recovered(space)  # oldest first
        self._announce()

    def latest(self) -> PolicyVersion | None:
        """Return the newest complete version, None where there is none."""
        return max(self._complete, default=None)

    def publish(self, version: PolicyVersion, step: int, weights: Weights) -> Manifest:
        """Copy weights into shared memory and make them the newest policy version.

        Whatever is raised, earlier versions stay as they are and the version is not visible.

        Args:
            version: higher than every version before, also those of earlier publishers of the run.
            step: optimizer steps that led to it.
            weights: names and dense arrays, read once, in order; copied before this returns.

        Raises:
            SegmentSpaceError: shared memory is full.
            TypeError: an element type the DCS does not carry.
            ValueError: the version is not higher, or a name comes twice or is `__metadata__`.
        """
        self._check_higher(version)
        self._retire(max(self._keep - 1, 1))
        with _Staging(self._space, self._pool, version) as staging:
            for bucket in fill_buckets(weights, self._bucket_bytes):
                staging.add(bucket)
            manifest = staging.commit(step)
        self._complete[version] = staging.segments
        point("publish_latest")
        self._announce()
        self._pool.drop()
        self._retire(self._keep)
        return manifest

    def close(self) -> None:
        """Let another publisher follow; what is published stays. Idempotent."""
        self._pool.drop()
        for segment in _flat(self._complete.values()):
            segment.close()
        self._latest.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_higher(self, version: PolicyVersion) -> None:
        newest = max((seen for seen in (self.latest(), self._latest.load()) if seen is not None), default=-1)
        if version <= newest:
            raise ValueError(f"policy version {version} is not higher than {newest}: versions never go back")

    def _announce(self) -> None:
        newest, announced = self.latest(), self._latest.load()
        if newest is not None and (announced is None or newest > announced):
            self._latest.store(newest)

    def _retire(self, keep: int) -> None:
        for version in sorted(self._complete)[:-keep]:
            self._space.unlink(self._space.name(OWNER, version, MANIFEST_LABEL))
            self._pool.add(self._complete.pop(version))


class _Staging:
    """A version on its way; it leaves nothing behind unless it is committed."""

    def __init__(self, space: ShmSpace, pool: SegmentPool, version: PolicyVersion) -> None:
        self.segments: list[Segment] = []
        self._space = space
        self._pool = pool
        self._version = version
        self._tensors: list[TensorEntry] = []
        self._buckets: list[BucketEntry] = []

    def add(self, bucket: Bucket) -> None:
        """Write one bucket."""
        segment, lock = self._segment(bucket.nbytes)
        self.segments.append(segment)
        with contextlib.closing(lock) if lock else contextlib.nullcontext():
            segment.buf[: len(bucket.head)] = bucket.head
            for placed in bucket.tensors:
                write(placed, segment.ndarray(np.uint8, (placed.nbytes,), placed.offset))
            point("publish_bucket")
            self._tensors.extend(_entry(placed, len(self._buckets)) for placed in bucket.tensors)
            self._buckets.append(BucketEntry(nbytes=bucket.nbytes, xxh3=checksum(segment.buf)))

    def commit(self, step: int) -> Manifest:
        """Write the manifest and make the version visible."""
        manifest = Manifest(
            version=self._version, step=step, tensors=tuple(self._tensors), buckets=tuple(self._buckets)
        )
        data = manifest.to_bytes()
        with self._space.create(OWNER, self._version, STAGING_LABEL, len(data)) as segment:
            segment.buf[:] = data
        point("publish_manifest")
        self._space.rename(segment.name, OWNER, self._version, MANIFEST_LABEL)
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._space.unlink(self._space.name(OWNER, self._version, MANIFEST_LABEL))
            self._space.sweep(OWNER, self._version)
            for segment in self.segments:
                segment.close()

    def _segment(self, nbytes: int) -> tuple[Segment, SegmentLock | None]:
        label = bucket_label(len(self.segments))
        taken = self._pool.take(nbytes)
        if taken is None:
            return self._created(label, nbytes), None
        segment, lock = taken
        segment.name = self._space.rename(segment.name, OWNER, self._version, label)
        return segment, lock

    def _created(self, label: str, nbytes: int) -> Segment:
        try:
            return self._space.create(OWNER, self._version, label, nbytes)
        except SegmentSpaceError:
            if not self._pool:
                raise
            self._pool.drop()  # the weights have another shape than before: nothing in there fits
            return self._space.create(OWNER, self._version, label, nbytes)


def _recovered(space: ShmSpace) -> dict[PolicyVersion, list[Segment]]:
    """Return the complete versions, oldest first; remove everything else the DCS owns."""
    complete: dict[PolicyVersion, list[Segment]] = {}
    for number in sorted({parse_name(name).incarnation for name in space.names(OWNER)}):
        version = PolicyVersion(number)
        try:
            complete[version] = _complete_segments(space, version)
        except (SegmentMissingError, PolicyCorruptError):
            space.sweep(OWNER, version)
        else:
            space.unlink(space.name(OWNER, version, STAGING_LABEL))
    return complete


def _complete_segments(space: ShmSpace, version: PolicyVersion) -> list[Segment]:
    with space.attach(space.name(OWNER, version, MANIFEST_LABEL)) as segment:
        manifest = Manifest.from_bytes(bytes(segment.buf), version)
    segments = []
    for index, bucket in enumerate(manifest.buckets):
        segments.append(space.attach(space.name(OWNER, version, bucket_label(index)), writable=True))
        if segments[-1].nbytes != bucket.nbytes:
            raise PolicyCorruptError(version, index, f"{bucket.nbytes} bytes", f"{segments[-1].nbytes}")
    return segments


def _entry(placed: Placed, bucket: int) -> TensorEntry:
    return TensorEntry(
        name=placed.name,
        dtype=placed.dtype,
        shape=placed.shape,
        bucket=bucket,
        offset=placed.offset,
        nbytes=placed.nbytes,
    )


def _flat(groups: Iterable[list[Segment]]) -> list[Segment]:
    return [segment for group in groups for segment in group]
