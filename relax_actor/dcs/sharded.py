"""The DCS of a trainer with several ranks: each writes its own bytes into the buckets of their host.

No rank ever has a whole model. A reshard plan, worked out once, says which bytes of whose shards make up
each Hugging Face tensor, and the buckets those tensors lie in are laid out once as well. To publish, all
ranks of the gang meet three times:

    rank 0 makes the buckets and their heads      -> all write what the plan takes from their shards
    all have written                              -> rank n sums up buckets n, n + ranks, ...
    all have summed up                            -> rank 0 writes the manifest, gives it its name, says so

Invariants
    1. A version is visible only after every rank has written and summed up its part: the manifest is last.
    2. A rank that dies, or raises, ends the gang at its next meeting, and nothing of the version is visible.
       What is left of it is removed by rank 0, or by the next gang's.
    3. A rank that stood still and goes on after its gang was replaced finds nothing to write to: what it had
       mapped has no name any more, and the number of a version is tried only once.
    4. Everything else is as with one rank: publisher.py.

Refused
    Gathering whole tensors on rank 0 (its memory, and one core for all bytes); a bucket for every rank
    (readers would have to know the trainer's layout).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_actor.dcs.header import Described
from relax_actor.dcs.layout import PlannedBucket, plan_buckets
from relax_actor.dcs.manifest import OWNER, BucketEntry, Manifest, bucket_label, checksum
from relax_actor.dcs.reshard import Copy, ReshardPlan
from relax_actor.dcs.reshard_arrays import carry_out
from relax_actor.dcs.shelf import Shelf, Staging
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.closing import Closing
from transport.shm import Segment, SegmentMissingError, ShmSpace

Shards = Mapping[str, npt.NDArray[np.uint8]]
"""By the trainer's name of a parameter: this rank's shard as published, uint8 [bytes], contiguous."""

SUMS_LABEL = "sums"


class ShardedPublisher(Closing):
    """One rank's part in offering policy versions to the readers of its host; all ranks are on one host.

    Args:
        space: the run's shared memory.
        plan: from the trainer's layout to whole tensors.
        rank: which trainer rank this is; rank 0 is the run's publisher.
        meet: returns when all ranks have called it, or raises in all that live when one is lost.
        keep: as for `PolicyPublisher`; only rank 0's counts.
        bucket_bytes: as for `PolicyPublisher`, the same for all ranks.
        budget_bytes: as for `PolicyPublisher`; only rank 0's counts.

    Raises:
        PublisherActiveError: another publisher of this run is alive.
        ValueError: the plan is for a replica with several ranks, or a number is out of range.
    """

    def __init__(
        self,
        space: ShmSpace,
        plan: ReshardPlan,
        rank: int,
        meet: Callable[[], object],
        *,
        keep: int = 2,
        bucket_bytes: int = 512 << 20,
        budget_bytes: int = 0,
    ) -> None:
        if plan.replica.tp != 1 or rank not in range(plan.trainer.world_size):
            raise ValueError(
                f"rank {rank} of {plan.trainer.world_size} cannot publish for {plan.replica.tp} replica ranks"
            )
        self._space, self._rank, self._ranks, self._meet = space, rank, plan.trainer.world_size, meet
        self._buckets = _laid_out(plan, bucket_bytes)
        self._writes = _writes(plan, rank, self._buckets)
        self._mapped: dict[int, Segment] = {}  # by inode
        self._shelf = Shelf(space, keep=keep, budget_bytes=budget_bytes) if rank == 0 else None

    def latest(self) -> PolicyVersion | None:
        """Return the newest complete version, None where there is none; on rank 0."""
        return self._shelf.newest() if self._shelf is not None else None

    def publish(self, version: PolicyVersion, step: int, shards: Shards) -> Manifest | None:
        """Write this rank's part of a version; all ranks call it, with the same version and step.

        Args:
            version: higher than every version before, and never tried before.
            step: optimizer steps that led to it.
            shards: of this rank; read before this returns.

        Returns:
            On rank 0 the manifest of the version, which is the newest now; None on the others.

        Raises:
            KeyError: a shard that the plan wants of this rank is missing.
            ValueError: a shard is shorter than planned, or the version is not higher.
            SegmentMissingError: another rank was lost and rank 0 has given the version up already.
            SegmentSpaceError, PolicyBudgetError: on rank 0, as for `PolicyPublisher`.
            Exception: whatever `meet` raises when a rank is lost. The version is not visible.
        """
        with self._begun(version) as staging:
            self._meet()
            buckets, sums = self._open(version)
            self._write(buckets, shards)
            self._meet()
            for index in range(self._rank, len(buckets), self._ranks):
                sums[index] = int(checksum(buckets[index].buf), 16)
            self._meet()
            return self._commit(staging, step, [f"{each:016x}" for each in sums]) if staging else None

    def close(self) -> None:
        """Let another gang follow; what is published stays. Idempotent."""
        self._mapped.clear()
        if self._shelf is not None:
            self._shelf.close()

    # -- rank 0 ---------------------------------------------------------------------------------

    def _begun(self, version: PolicyVersion) -> AbstractContextManager[Staging | None]:
        if self._shelf is None:
            return nullcontext()
        staging = self._shelf.begin(version)
        try:
            for index, bucket in enumerate(self._buckets):
                staging.bucket(index, bucket.nbytes).buf[: len(bucket.head)] = bucket.head
            self._space.create(OWNER, version, SUMS_LABEL, 8 * max(len(self._buckets), 1)).close()
        except BaseException:
            staging.roll_back()
            raise
        return staging

    def _commit(self, staging: Staging, step: int, sums: list[str]) -> Manifest:
        self._space.unlink(self._space.name(OWNER, staging.version, SUMS_LABEL))
        for index in range(len(self._buckets)):
            staging.filled(index)
        manifest = Manifest(
            version=staging.version,
            step=step,
            tensors=tuple(entry for bucket in self._buckets for entry in bucket.tensors),
            buckets=tuple(
                BucketEntry(nbytes=bucket.nbytes, xxh3=found)
                for bucket, found in zip(self._buckets, sums, strict=True)
            ),
        )
        staging.commit(manifest, "publish")
        return manifest

    # -- every rank -----------------------------------------------------------------------------

    def _open(self, version: PolicyVersion) -> tuple[list[Segment], npt.NDArray[np.uint64]]:
        """Map a version's buckets, and the place for their checksums, uint64 [buckets]."""
        self._mapped = self._kept()
        buckets = [
            self._opened(self._space.name(OWNER, version, bucket_label(index)))
            for index in range(len(self._buckets))
        ]
        with self._space.attach(self._space.name(OWNER, version, SUMS_LABEL), writable=True) as segment:
            return buckets, segment.ndarray(np.uint64, (len(buckets),))

    def _kept(self) -> dict[int, Segment]:
        """Return the mappings whose segments may come again: mapping one anew costs as much as filling it."""
        named = {self._inode(name) for name in self._space.names(OWNER)}
        return {inode: segment for inode, segment in self._mapped.items() if inode in named}

    def _opened(self, name: str) -> Segment:
        inode = self._inode(name)
        if inode not in self._mapped:
            self._mapped[inode] = self._space.attach(name, writable=True)
        return self._mapped[inode]

    def _inode(self, name: str) -> int:
        try:
            return (self._space.root / name).stat().st_ino
        except FileNotFoundError as error:
            raise SegmentMissingError(name) from error

    def _write(self, buckets: list[Segment], shards: Shards) -> None:
        for bucket, writes in zip(buckets, self._writes, strict=True):
            for copy, offset, nbytes in writes:
                carry_out(copy, shards[copy.parameter], bucket.ndarray(np.uint8, (nbytes,), offset))
            point("publish_bucket")


class _Write(NamedTuple):
    """A copy out of a shard of this rank, and the tensor in the bucket that it goes to."""

    copy: Copy
    offset: int  # bytes from the start of the bucket
    nbytes: int  # of the tensor


def _laid_out(plan: ReshardPlan, bucket_bytes: int) -> list[PlannedBucket]:
    tensors = (Described(name=each.name, dtype=each.dtype, shape=each.shape) for each in plan.of_rank(0))
    return list(plan_buckets(tensors, bucket_bytes))


def _writes(plan: ReshardPlan, rank: int, buckets: list[PlannedBucket]) -> list[list[_Write]]:
    """Return, for each bucket, what this rank writes into it."""
    copies = {shard.name: [copy for copy in shard.copies if copy.source == rank] for shard in plan.of_rank(0)}
    return [
        [_Write(copy, entry.offset, entry.nbytes) for entry in bucket.tensors for copy in copies[entry.name]]
        for bucket in buckets
    ]
