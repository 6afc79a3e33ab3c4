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

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from relax_actor.dcs.layout import Bucket, Placed, fill_buckets, written
from relax_actor.dcs.manifest import BucketEntry, Manifest, TensorEntry
from relax_actor.dcs.shelf import Shelf, Staging
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.closing import Closing
from transport.shm import ShmSpace

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterable[tuple[str, "npt.NDArray[Any] | Tensor"]]


class PolicyPublisher(Closing):
    """Offers policy versions to the readers of one host. A run has one at a time.

    Making one removes what a dead publisher left half-written and keeps what it completed.

    Args:
        space: the run's shared memory.
        keep: how many versions stay readable; while one is written, one less, but always the newest.
        bucket_bytes: the largest bucket, its head included; a single larger tensor has one to itself.
        budget_bytes: the most that versions, complete or not, may take; 0 is no limit. Where it is too
            little for `keep` versions, fewer are kept.

    Raises:
        PublisherActiveError: another publisher of this run is alive.
        ValueError: `keep` or `bucket_bytes` is below 1, or `budget_bytes` below 0.
    """

    def __init__(
        self, space: ShmSpace, *, keep: int = 2, bucket_bytes: int = 512 << 20, budget_bytes: int = 0
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
        self._bucket_bytes = bucket_bytes
        self._shelf = Shelf(space, keep=keep, budget_bytes=budget_bytes)

    def latest(self) -> PolicyVersion | None:
        """Return the newest complete version, None where there is none."""
        return self._shelf.newest()

    def publish(self, version: PolicyVersion, step: int, weights: Weights) -> Manifest:
        """Copy weights into shared memory and make them the newest policy version.

        Whatever is raised, the newest version stays as it is and this one is not visible.

        Args:
            version: higher than every version before, also those of earlier publishers of the run.
            step: optimizer steps that led to it.
            weights: names and dense arrays, read once, in order; copied before this returns.

        Raises:
            SegmentSpaceError: shared memory is full.
            PolicyBudgetError: the budget does not allow it beside the version before.
            TypeError: an element type the DCS does not carry.
            ValueError: the version is not higher, or a name comes twice or is `__metadata__`.
        """
        tensors: list[TensorEntry] = []
        buckets: list[BucketEntry] = []
        with self._shelf.begin(version) as staging:
            for index, bucket in enumerate(fill_buckets(weights, self._bucket_bytes)):
                buckets.append(_write(staging, index, bucket))
                tensors.extend(_entry(placed, index) for placed in bucket.tensors)
            manifest = Manifest(version=version, step=step, tensors=tuple(tensors), buckets=tuple(buckets))
            staging.commit(manifest, "publish")
        return manifest

    def close(self) -> None:
        """Let another publisher follow; what is published stays. Idempotent."""
        self._shelf.close()


def _write(staging: Staging, index: int, bucket: Bucket) -> BucketEntry:
    segment = staging.bucket(index, bucket.nbytes)
    segment.buf[: len(bucket.head)] = bucket.head
    summed = xxhash.xxh3_64(bucket.head)
    for placed in sorted(bucket.tensors, key=attrgetter("offset")):
        for piece in written(placed, segment.ndarray(np.uint8, (placed.nbytes,), placed.offset)):
            summed.update(piece.data)
    point("publish_bucket")
    entry = BucketEntry(nbytes=bucket.nbytes, xxh3=summed.hexdigest())
    staging.filled(index)
    return entry


def _entry(placed: Placed, bucket: int) -> TensorEntry:
    return TensorEntry(
        name=placed.name,
        dtype=placed.dtype,
        shape=placed.shape,
        bucket=bucket,
        offset=placed.offset,
        nbytes=placed.nbytes,
    )
