"""The rollout's side of the DCS: look which policy version is newest, open it, check it, install it.

Opening takes a lease on every bucket, so what is open never changes; see publisher.py for why that holds.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relax_actor.dcs.latest import LatestReader
from relax_actor.dcs.layout import array_view, tensor_view
from relax_actor.dcs.manifest import (
    MANIFEST_LABEL,
    OWNER,
    BucketEntry,
    Manifest,
    PolicyCorruptError,
    TensorEntry,
    bucket_label,
    checksum,
)
from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.closing import Closing
from transport.mappings import Mappings
from transport.shm import Segment, SegmentBusyError, SegmentMissingError, ShmSpace, parse_name

if TYPE_CHECKING:
    from torch import Tensor


class PolicyMissingError(RelaxError):
    """The version is not there: not published yet, or retired.

    Args:
        version: the version asked for; None is the newest.
        latest: the newest one there is, None before the first.
        where: it is not there.
    """

    def __init__(
        self,
        version: PolicyVersion | None,
        latest: PolicyVersion | None,
        where: str = "in shared memory",
    ) -> None:
        self.version, self.latest, self.where = version, latest, where
        wanted = "no policy version" if version is None else f"policy version {version} is not"
        newest = "nothing was published" if latest is None else f"the newest is {latest}"
        super().__init__(f"{wanted} {where}; {newest}")


class PolicySnapshot(Closing):
    """One policy version, leased: its bytes stay as they are until `close`, and as long as any view lives."""

    def __init__(self, manifest: Manifest, segments: list[Segment]) -> None:
        self.manifest = manifest
        self._segments = segments

    @property
    def version(self) -> PolicyVersion:
        """Which policy version this is."""
        return self.manifest.version

    def verify(self) -> None:
        """Compare every bucket with its checksum; reads all bytes once.

        Raises:
            PolicyCorruptError: a bucket was cut or altered; do not install.
        """
        for error in self.damages():
            raise error

    def damages(self) -> Iterator[PolicyCorruptError]:
        """Yield an error for each bucket that is not as published; as `verify`, but goes on."""
        for index, bucket in enumerate(self.manifest.buckets):
            point("verify_bucket")
            try:
                _check_bucket(self._segments[index], self.version, index, bucket)
            except PolicyCorruptError as error:
                yield error

    def buckets(self) -> Iterator[Segment]:
        """Yield the segments, in order: each a `.safetensors` file, leased like all of the version."""
        yield from self._segments

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield names and tensors, in the order they were published in.

        The tensors are views of read-only memory: copy from them, never write to them (a SIGSEGV).
        """
        for entry, raw in self._entries():
            yield entry.name, tensor_view(entry, raw)

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield the same as read-only arrays without torch; bfloat16 as uint16, float8 as uint8."""
        for entry, raw in self._entries():
            yield entry.name, array_view(entry, raw)

    def close(self) -> None:
        """Give the lease back; with views still out, the last of them does. Idempotent."""
        for segment in self._segments:
            segment.close()

    def _entries(self) -> Iterator[tuple[TensorEntry, npt.NDArray[np.uint8]]]:
        reached = -1
        for entry in self.manifest.tensors:
            if entry.bucket != reached:
                reached = entry.bucket
                point("install_bucket")
            yield entry, self._segments[entry.bucket].ndarray(np.uint8, (entry.nbytes,), entry.offset)


class PolicyReceiver:
    """Reads policy versions; it may be made before there is a publisher.

    Args:
        space: the run's shared memory.
    """

    def __init__(self, space: ShmSpace) -> None:
        self._space = space
        self._mappings = Mappings(space)
        self._latest = LatestReader(space)

    def latest(self) -> PolicyVersion | None:
        """Return the newest published version, None before the first; a load from memory."""
        return self._latest.load()

    def newest_visible(self) -> PolicyVersion | None:
        """Return the newest version with a manifest, also where the word that announces it was lost."""
        visible = {parse_name(name) for name in self._space.names(OWNER)}
        versions = [name.incarnation for name in visible if name.label == MANIFEST_LABEL]
        return PolicyVersion(max(versions)) if versions else None

    def open(self, version: PolicyVersion | None = None) -> PolicySnapshot:
        """Lease a version.

        Args:
            version: which one; None is the newest, whichever that is by the time it is open.

        Raises:
            PolicyMissingError: it was not published, or is retired.
            PolicyCorruptError: its manifest is damaged, or a bucket is gone or has another length.
        """
        if version is not None:
            return self._leased(version)
        while True:  # once more only if a newer version was published meanwhile
            newest = self.latest()
            if newest is None:
                raise PolicyMissingError(None, None)
            try:
                return self._leased(newest)
            except PolicyMissingError:
                if self.latest() == newest:
                    raise

    def manifest(self, version: PolicyVersion) -> Manifest:
        """Return what a version consists of, without a lease.

        Raises:
            PolicyMissingError: it was not published, or is retired.
            PolicyCorruptError: its manifest is damaged.
        """
        try:
            with self._space.attach(self._space.name(OWNER, version, MANIFEST_LABEL)) as segment:
                return Manifest.from_bytes(bytes(segment.buf), version)
        except SegmentMissingError as error:
            raise PolicyMissingError(version, self.latest()) from error

    def is_visible(self, version: PolicyVersion) -> bool:
        """Whether a version is published and not retired."""
        return self._space.exists(self._space.name(OWNER, version, MANIFEST_LABEL))

    def _leased(self, version: PolicyVersion) -> PolicySnapshot:
        manifest = self.manifest(version)
        self._mappings.trim()
        with contextlib.ExitStack() as stack:
            segments = [
                stack.enter_context(self._bucket(version, index, bucket))
                for index, bucket in enumerate(manifest.buckets)
            ]
            # Only now is it certain that the leases came before the publisher's locks.
            self._check_visible(version)
            stack.pop_all()
        return PolicySnapshot(manifest, segments)

    def _bucket(self, version: PolicyVersion, index: int, bucket: BucketEntry) -> Segment:
        try:
            segment = self._mappings.lease(self._space.name(OWNER, version, bucket_label(index)))
        except (SegmentMissingError, SegmentBusyError) as error:
            self._check_visible(version)  # the usual reason: retired a moment ago
            raise PolicyCorruptError(version, index, f"{bucket.nbytes} bytes", str(error)) from error
        _check_length(segment, version, index, bucket)
        return segment

    def _check_visible(self, version: PolicyVersion) -> None:
        if not self.is_visible(version):
            raise PolicyMissingError(version, self.latest())


def _check_bucket(segment: Segment, version: PolicyVersion, index: int, bucket: BucketEntry) -> None:
    _check_length(segment, version, index, bucket)
    found = checksum(segment.buf)
    if found != bucket.xxh3:
        raise PolicyCorruptError(version, index, bucket.xxh3, found)


def _check_length(segment: Segment, version: PolicyVersion, index: int, bucket: BucketEntry) -> None:
    # Touching a page beyond the file's end is a SIGBUS, so lengths are compared before any byte is read.
    if segment.nbytes != bucket.nbytes or segment.file_bytes != bucket.nbytes:
        raise PolicyCorruptError(version, index, f"{bucket.nbytes} bytes", f"{segment.file_bytes}")
