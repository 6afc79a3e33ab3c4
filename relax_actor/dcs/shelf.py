"""The versions that one process writes into its host's shared memory: begun, completed, retired, adopted.

The publisher of a run has such a shelf on the trainer's host, and each store has one on its own; readers see
no difference. publisher.py says what holds and why. In short: a version is begun, its buckets are filled in
any order, its manifest gets its final name, and the word says so. Memory of retired versions is written
again. What does not fit the budget, or the file system, makes the shelf keep fewer versions before it fails;
the newest complete one stays.
"""

from types import TracebackType
from typing import Self

from relax_actor.dcs.latest import LatestWriter
from relax_actor.dcs.manifest import (
    MANIFEST_LABEL,
    OWNER,
    STAGING_LABEL,
    Manifest,
    PolicyCorruptError,
    bucket_label,
)
from relax_actor.dcs.pool import SegmentPool
from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.shm import Segment, SegmentLock, SegmentMissingError, SegmentSpaceError, ShmSpace, parse_name


class PolicyBudgetError(RelaxError):
    """A policy version does not fit into the memory that may be used for versions; nothing of it is left.

    Args:
        version: the policy version.
        need_bytes: how much of it is known to be needed.
        held_bytes: what the newest complete version takes, which stays.
        budget_bytes: the limit.
    """

    def __init__(self, version: PolicyVersion, need_bytes: int, held_bytes: int, budget_bytes: int) -> None:
        self.version, self.need_bytes = version, need_bytes
        self.held_bytes, self.budget_bytes = held_bytes, budget_bytes
        beside = f" beside the {held_bytes} bytes of the version before, which stays" if held_bytes else ""
        super().__init__(
            f"policy version {version} needs {need_bytes} bytes of shared memory{beside}; "
            f"the budget is {budget_bytes}"
            "\n\nhint: raise `dcs.budget_bytes` to two versions at least, or set it to 0 for no limit"
        )


class Shelf:
    """A host's complete versions. A run has one shelf a host at a time.

    Making one removes what a dead one left half-written and keeps what it completed.

    Args:
        space: the run's shared memory.
        keep: how many versions stay readable; while one is written, one less, but always the newest.
        budget_bytes: the most that versions, complete or not, may take; 0 is no limit.

    Raises:
        PublisherActiveError: another shelf of this run is on this host, and its process is alive.
        ValueError: `keep` is below 1, or `budget_bytes` below 0.
    """

    def __init__(self, space: ShmSpace, *, keep: int = 2, budget_bytes: int = 0) -> None:
        if keep < 1 or budget_bytes < 0:
            raise ValueError(f"keep={keep} must be at least 1 and budget_bytes={budget_bytes} at least 0")
        self.space = space
        self._keep, self._budget_bytes = keep, budget_bytes
        self._latest = LatestWriter(space)
        self._pool = SegmentPool(space)
        self._complete = _recovered(space)  # oldest first
        self._say_newest()

    def newest(self) -> PolicyVersion | None:
        """Return the newest complete version, None where there is none."""
        return max(self._complete, default=None)

    def begin(self, version: PolicyVersion) -> "Staging":
        """Start a version; of those that are there, the oldest makes room.

        Raises:
            ValueError: it is not higher than every version before, here or by the word.
        """
        seen = [number for number in (self.newest(), self._latest.load()) if number is not None]
        if version <= max(seen, default=-1):
            raise ValueError(
                f"policy version {version} is not higher than {max(seen)}: versions never go back"
            )
        self._retire(max(self._keep - 1, 1))
        return Staging(self, version)

    def check_budget(self, version: PolicyVersion, need_bytes: int) -> None:
        """Say at once that a version cannot fit.

        Raises:
            PolicyBudgetError: it cannot, also beside no more than the newest one.
        """
        newest = self.newest()
        held_bytes = 0 if newest is None else sum(segment.nbytes for segment in self._complete[newest])
        if self._budget_bytes and held_bytes + need_bytes > self._budget_bytes:
            raise PolicyBudgetError(version, need_bytes, held_bytes, self._budget_bytes)

    def close(self) -> None:
        """Let another shelf follow; what is complete stays. Idempotent."""
        self._pool.drop()
        for segments in self._complete.values():
            _close(segments)
        self._latest.close()

    # -- for its stagings -----------------------------------------------------------------------

    def acquire(self, staging: "Staging", label: str, nbytes: int) -> tuple[Segment, SegmentLock | None]:
        """Find memory for a bucket: what was retired, or new; keep fewer versions where neither is there.

        Raises:
            PolicyBudgetError: there is too little of it by the budget.
            SegmentSpaceError: there is too little of it in the file system.
        """
        while True:
            if (taken := self._pool.take(nbytes)) is not None:
                segment, lock = taken
                segment.name = self.space.rename(segment.name, OWNER, staging.version, label)
                return segment, lock
            if not self._fits(staging.nbytes + nbytes):
                if not self._shrink():
                    self.check_budget(staging.version, staging.nbytes + nbytes)
                continue
            try:
                return self.space.create(OWNER, staging.version, label, nbytes), None
            except SegmentSpaceError:
                if not self._shrink():
                    raise

    def complete(self, version: PolicyVersion, segments: list[Segment]) -> None:
        """Take over a version that has its manifest."""
        self._complete[version] = segments

    def announce(self) -> None:
        """Say which version is the newest, and retire what is beyond `keep`."""
        self._say_newest()
        self._pool.drop()
        self._retire(self._keep)

    def recycle(self, segments: list[Segment]) -> None:
        """Take back the memory of a version that was given up."""
        self._pool.add(segments)

    # -- inside ---------------------------------------------------------------------------------

    def _fits(self, staged_bytes: int) -> bool:
        complete_bytes = sum(segment.nbytes for kept in self._complete.values() for segment in kept)
        used_bytes = complete_bytes + self._pool.nbytes + staged_bytes
        return not self._budget_bytes or used_bytes <= self._budget_bytes

    def _shrink(self) -> bool:
        """Give up what can be done without; return whether that was anything."""
        if self._pool:
            self._pool.drop()  # of another size than what is needed
            return True
        if len(self._complete) > 1:
            self._retire(len(self._complete) - 1)
            return True
        return False

    def _say_newest(self) -> None:
        newest, announced = self.newest(), self._latest.load()
        if newest is not None and (announced is None or newest > announced):
            self._latest.store(newest)

    def _retire(self, keep: int) -> None:
        for version in sorted(self._complete)[:-keep]:
            self.space.unlink(self.space.name(OWNER, version, MANIFEST_LABEL))
            self._pool.add(self._complete.pop(version))


class Staging:
    """A version on its way; it leaves nothing behind unless it is committed.

    Attributes:
        version: which one.
        nbytes: in its buckets so far.
    """

    def __init__(self, shelf: Shelf, version: PolicyVersion) -> None:
        self.version, self.nbytes = version, 0
        self._shelf, self._space = shelf, shelf.space
        self._segments: dict[int, Segment] = {}
        self._locks: dict[int, SegmentLock | None] = {}
        self._is_complete = False

    def bucket(self, index: int, nbytes: int) -> Segment:
        """Return the memory of a bucket, for the caller alone until `filled`.

        Raises:
            PolicyBudgetError: there is too little of it by the budget.
            SegmentSpaceError: there is too little of it in the file system.
        """
        segment, self._locks[index] = self._shelf.acquire(self, bucket_label(index), nbytes)
        self._segments[index] = segment
        self.nbytes += nbytes
        return segment

    def filled(self, index: int) -> None:
        """Say that a bucket's bytes are final."""
        lock = self._locks.pop(index)
        if lock is not None:
            lock.close()

    def commit(self, manifest: Manifest, actor: str) -> None:
        """Write the manifest, make the version visible and announce it.

        Args:
            manifest: describes every bucket, all of which are filled.
            actor: `publish` or `store`: which fault points are passed.
        """
        data = manifest.to_bytes()
        with self._space.create(OWNER, self.version, STAGING_LABEL, len(data)) as segment:
            segment.buf[:] = data
        point(f"{actor}_manifest")
        self._space.rename(segment.name, OWNER, self.version, MANIFEST_LABEL)
        self._is_complete = True
        self._shelf.complete(self.version, [self._segments[index] for index in sorted(self._segments)])
        point(f"{actor}_latest")
        self._shelf.announce()

    def give_up(self) -> None:
        """Drop the version unless it is complete, but keep its memory for the next."""
        if self._is_complete:
            return
        self._unlock()
        self._shelf.recycle(list(self._segments.values()))
        self._segments.clear()

    def roll_back(self) -> None:
        """Remove all of it."""
        self._unlock()
        self._space.unlink(self._space.name(OWNER, self.version, MANIFEST_LABEL))
        self._space.sweep(OWNER, self.version)
        _close(list(self._segments.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self._is_complete:
            self.roll_back()

    def _unlock(self) -> None:
        for index in list(self._locks):
            self.filled(index)


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


def _close(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()
