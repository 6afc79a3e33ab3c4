"""What a host has of policy versions: complete ones, and on other hosts than the trainer's one on its way.

On the trainer's host the publisher writes, and the store only reads what it wrote. On every other host the
store writes, into a shelf of its own and in the same format, so that a `PolicyReceiver` there sees no
difference. Links of the relay read both alike, also a version whose later buckets are still on their way.

Invariant: a bucket is shown to anybody only after its checksum was compared, a version only with all of them.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from relax_actor.dcs.manifest import OWNER, Manifest, PolicyCorruptError, bucket_label
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver
from relax_actor.dcs.shelf import Shelf
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.mappings import Mappings
from transport.shm import Segment, SegmentBusyError, SegmentMissingError, ShmSpace


class Incoming:
    """A version on its way into a shelf.

    Attributes:
        manifest: what it will be.
    """

    def __init__(self, shelf: Shelf, manifest: Manifest) -> None:
        shelf.check_budget(manifest.version, manifest.nbytes)
        self.manifest = manifest
        self._staging = shelf.begin(manifest.version)
        self._open: dict[int, Segment] = {}
        self._here: set[int] = set()

    @property
    def version(self) -> PolicyVersion:
        """Which policy version it is."""
        return self.manifest.version

    def has(self, bucket: int) -> bool:
        """Whether the bucket is here and verified."""
        return bucket in self._here

    def target(self, bucket: int) -> memoryview:
        """Return the memory that the bucket is to be written into; nobody else sees it.

        Raises:
            PolicyBudgetError: there is too little of it by the budget.
            SegmentSpaceError: there is too little of it in the file system.
        """
        if bucket not in self._open:
            self._open[bucket] = self._staging.bucket(bucket, self.manifest.buckets[bucket].nbytes)
        return self._open[bucket].buf

    def verified(self, bucket: int) -> None:
        """The bucket's bytes are what the manifest says."""
        point("store_bucket")
        self._staging.filled(bucket)
        del self._open[bucket]
        self._here.add(bucket)

    def finish(self) -> None:
        """Make the version visible and the newest."""
        self._staging.commit(self.manifest, "store")

    def give_up(self) -> None:
        """Drop the version, but keep its memory for the next."""
        self._staging.give_up()


class HostStore:
    """The versions of one host.

    Args:
        space: the host's shared memory.
        shelf: where this store writes; None on the trainer's host.
    """

    def __init__(self, space: ShmSpace, shelf: Shelf | None = None) -> None:
        self.space, self.shelf = space, shelf
        self.mappings = Mappings(space)  # a new mapping a version would cost a fifth of the rate of a link
        self._receiver = PolicyReceiver(space)
        self._incoming: Incoming | None = None
        self._lock = threading.Lock()
        self._bells: set[int] = set()
        self._seen = self._receiver.latest()

    def newest(self) -> tuple[PolicyVersion, bool] | None:
        """Return the newest version that there is anything of, and whether it is complete."""
        incoming, complete = self._incoming, self._receiver.latest()
        if incoming is not None and incoming.version > (-1 if complete is None else complete):
            return incoming.version, False
        return None if complete is None else (complete, True)

    def latest(self) -> PolicyVersion | None:
        """Return the newest complete version."""
        return self._receiver.latest()

    def manifest(self, version: PolicyVersion) -> Manifest:
        """Return what a version consists of.

        Raises:
            PolicyMissingError: it is neither here nor on its way.
            PolicyCorruptError: its manifest is damaged.
        """
        incoming = self._incoming
        if incoming is not None and incoming.version == version:
            return incoming.manifest
        return self._receiver.manifest(version)

    def look(self) -> None:
        """Ring if somebody else has published meanwhile."""
        latest = self._receiver.latest()
        if latest != self._seen:
            self._seen = latest
            self.ring()

    # -- who reads ------------------------------------------------------------------------------

    @contextmanager
    def bell(self) -> Iterator[int]:
        """Yield an eventfd that is written to whenever there is more than before."""
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._lock:
            self._bells.add(bell)
        try:
            yield bell
        finally:
            with self._lock:
                self._bells.discard(bell)
            os.close(bell)

    def ring(self) -> None:
        """Wake all who wait for more."""
        with self._lock:
            for bell in self._bells:
                os.eventfd_write(bell, 1)

    def lease(self, version: PolicyVersion) -> "VersionLease":
        """Hold on to a version; what was leased stays as it is until the lease is closed."""
        self.mappings.trim()
        return VersionLease(self, version)

    # -- who writes -----------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> Incoming:
        """Start to pull a version.

        Raises:
            PolicyBudgetError: it cannot fit.
            ValueError: it is not newer than what is here.
        """
        assert self.shelf is not None  # noqa: S101 - only a store with a shelf pulls
        self._incoming = Incoming(self.shelf, manifest)
        self.ring()
        return self._incoming

    @property
    def incoming(self) -> Incoming | None:
        """The version on its way."""
        return self._incoming

    def verified(self, bucket: int) -> None:
        """The bucket of the version on its way is what its manifest says."""
        if self._incoming is not None:
            self._incoming.verified(bucket)
            self.ring()

    def finish(self) -> None:
        """The version on its way is here."""
        if self._incoming is not None:
            self._incoming.finish()
            self._incoming = None
            self.ring()

    def give_up(self) -> None:
        """The version on its way will not come, if there is one."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.give_up()
            self.ring()

    def close(self) -> None:
        """Let another store follow; what is complete stays."""
        self.give_up()
        self.mappings.close()
        if self.shelf is not None:
            self.shelf.close()

    def holds(self, version: PolicyVersion, bucket: int) -> bool:
        """Whether a bucket may be read now.

        Raises:
            PolicyMissingError: the version is neither here nor on its way.
        """
        incoming = self._incoming
        if incoming is not None and incoming.version == version:
            return incoming.has(bucket)
        if not self._receiver.is_visible(version):
            raise PolicyMissingError(version, self.latest())
        return True


class VersionLease:
    """One reader's hold on one version; of a version on its way it is taken bucket by bucket."""

    def __init__(self, store: HostStore, version: PolicyVersion) -> None:
        self.version = version
        self._store = store
        self._held = ExitStack()
        self._segments: dict[int, Segment] = {}

    def bucket(self, index: int) -> Segment | None:
        """Return a bucket that stays as it is while the lease lasts; None while it is on its way.

        Raises:
            PolicyMissingError: the version was retired or given up.
            PolicyCorruptError: a bucket has another length than its manifest says.
        """
        if index not in self._segments:
            if not self._store.holds(self.version, index):
                return None
            self._take(index)
        return self._segments[index]

    def close(self) -> None:
        """Let go of all of it. Idempotent."""
        self._segments.clear()
        self._held.close()

    def _take(self, index: int) -> None:
        """Lease the bucket and, of a complete version, all others too, so that it can be read to its end."""
        space = self._store.space
        buckets = self._store.manifest(self.version).buckets
        try:
            for each in (index, *range(len(buckets))):
                if each not in self._segments and self._store.holds(self.version, each):
                    name = space.name(OWNER, self.version, bucket_label(each))
                    segment = self._held.enter_context(self._store.mappings.lease(name))
                    if segment.nbytes != buckets[each].nbytes:
                        expected, found = f"{buckets[each].nbytes} bytes", f"{segment.nbytes}"
                        raise PolicyCorruptError(self.version, each, expected, found)
                    self._segments[each] = segment
            # As in receiver.py: only now is it certain that the lease came before the writer's lock.
            self._store.holds(self.version, index)
        except (SegmentMissingError, SegmentBusyError) as error:
            raise PolicyMissingError(self.version, self._store.latest()) from error
