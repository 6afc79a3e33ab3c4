"""The trainer's weights as they were published, on its GPU, for others to read over NVLink.

Two buffers take turns. Each has a record in shared memory: what lies in it, and the handle it is opened by.
A lock on the record is the right to the buffer: shared while somebody reads, exclusive while the publisher
writes. The publisher never waits: a buffer with readers is passed over. A reader that dies has no lock any
more. When the publisher's process ends, so does its memory: whoever has it open must let go of it, and finds
that out by the lock that every publisher holds on its records' index.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence

import msgspec
from torch import Tensor

from relax_actor.dcs.cuda.device import Gpus, Mark, Memory
from relax_actor.dcs.cuda.staging import is_alive
from relax_actor.dcs.latest import PublisherActiveError
from relax_actor.ids import PolicyVersion
from transport.shm import (
    Segment,
    SegmentError,
    SegmentExistsError,
    SegmentLock,
    ShmSpace,
)

OWNER = "dcs-snapshot"
_INDEX = "index"  # its lock says that the publisher lives; a number of its own is no buffer's
_BUFFER = "buffer"
_RECORD_BYTES = 256 << 10
_HEAD_BYTES = 8
_ALIGN_BYTES = 512
_TOKEN_BYTES = 16
_LOOK_S = 1.0


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a buffer."""

    writer: bytes  # which publisher
    version: PolicyVersion
    device: str  # UUID
    handle: bytes
    nbytes: int  # of the buffer
    starts: tuple[int, ...]  # where each bucket begins, in bytes


def starts_of(bucket_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Lay buckets one after the other; return where each begins, and the end of the last."""
    starts, end = [], 0
    for nbytes in bucket_bytes:
        starts.append(end)
        end += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return tuple(starts), end


class Buffer:
    """One of the publisher's buffers; it is written between `SnapshotWriter.take` and `offer`.

    Attributes:
        buckets: uint8, one a bucket.
        freed: after which moment each bucket may be written again; None is at once.
    """

    def __init__(
        self,
        memory: Memory,
        segment: Segment,
        writer: bytes,
        starts: tuple[int, ...],
        sizes: Sequence[int],
    ) -> None:
        self.buckets = [
            memory.data[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)
        ]
        self.freed: list[Mark | None] = [None] * len(starts)
        self.name = segment.name
        self._memory, self._segment, self._writer, self._starts = memory, segment, writer, starts
        self._lock: SegmentLock | None = None

    def take(self, lock: SegmentLock) -> None:
        """Hold the right to write, and withdraw what was offered."""
        self._lock = lock
        self._segment.buf[:_HEAD_BYTES] = bytes(_HEAD_BYTES)

    def offer(self, version: PolicyVersion) -> None:
        """Let others read `version`, all of which is there."""
        record = SnapshotRecord(
            writer=self._writer,
            version=version,
            device=self._memory.device,
            handle=self._memory.handle,
            nbytes=self._memory.data.numel(),
            starts=self._starts,
        )
        text = msgspec.msgpack.encode(record)
        self._segment.buf[_HEAD_BYTES : _HEAD_BYTES + len(text)] = text
        self._segment.buf[:_HEAD_BYTES] = len(text).to_bytes(_HEAD_BYTES, "little")
        self.release()

    def release(self) -> None:
        """Give the right to write back. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def close(self) -> None:
        """Free the memory."""
        self.release()
        self.buckets.clear()
        self._segment.close()
        self._memory.close()


class SnapshotWriter:
    """The publisher's buffers.

    Args:
        space: the run's shared memory; the caller is the run's only publisher.
        gpus: of this process.
        device: UUID of the GPU with the weights.
        bucket_bytes: the size of each bucket.
        buffers: how many there are.

    Raises:
        DeviceError: the GPU has no room for them.
    """

    def __init__(
        self, space: ShmSpace, gpus: Gpus, device: str, bucket_bytes: Sequence[int], *, buffers: int = 2
    ) -> None:
        self._space = space
        self._buffers: list[Buffer] = []
        self._alive, writer = _claimed(space)
        starts, nbytes = starts_of(bucket_bytes)
        try:
            for number in range(buffers):
                memory = gpus.allocate(device, nbytes)
                segment = space.create(OWNER, number, _BUFFER, _RECORD_BYTES)
                self._buffers.append(Buffer(memory, segment, writer, starts, bucket_bytes))
        except BaseException:
            self.close()
            raise

    def take(self) -> Buffer | None:
        """Return the buffer that was written longest ago of those without readers; None if all have some."""
        for buffer in self._buffers:
            lock = self._space.try_lock(buffer.name)
            if lock is not None:
                buffer.take(lock)
                self._buffers.remove(buffer)
                self._buffers.append(buffer)
                return buffer
        return None

    def close(self) -> None:
        """Free all buffers, and tell readers. Idempotent."""
        for buffer in self._buffers:
            self._space.unlink(buffer.name)
            buffer.close()
        self._buffers.clear()
        self._alive.close()


class SnapshotLease:
    """A version in a publisher's buffer, which stays as it is until `close`."""

    def __init__(self, record: SnapshotRecord, segment: Segment) -> None:
        self.record = record
        self._segment = segment

    def close(self) -> None:
        """Let the publisher write the buffer again. Idempotent."""
        self._segment.close()


class SnapshotReader:
    """Finds versions on GPUs, and keeps their memory open between two of them. Several threads may read.

    Args:
        space: the run's shared memory.
        gpus: must see the publisher's GPU.
    """

    def __init__(self, space: ShmSpace, gpus: Gpus) -> None:
        self._space, self._gpus = space, gpus
        self._lock = threading.Lock()
        self._opened: dict[tuple[bytes, bytes], Memory] = {}

    def lease(self, version: PolicyVersion) -> SnapshotLease | None:
        """Hold on to a version; None where no buffer has it."""
        writer = self._living_writer()
        if not writer:
            return None
        for name in self._space.names(OWNER):
            if name.endswith(_BUFFER) and (lease := self._leased(name, version, writer)) is not None:
                return lease
        return None

    def bucket(self, record: SnapshotRecord, bucket: int, nbytes: int) -> Tensor:
        """Return a leased bucket, uint8 [nbytes], on the publisher's GPU.

        Raises:
            DeviceError: its memory is gone.
            UnknownDeviceError: this process does not see that GPU.
        """
        key = (record.writer, record.handle)
        with self._lock:
            if key not in self._opened:
                self._opened[key] = self._gpus.open(record.device, record.handle, record.nbytes)
            memory = self._opened[key]
        start = record.starts[bucket]
        return memory.data[start : start + nbytes]

    def forget_dead(self) -> int:
        """Let go of the memory of publishers that have ended; return how many buffers that were."""
        if not self._opened:
            return 0
        writer = self._living_writer()
        dead = [key for key in self._opened if key[0] != writer]
        for key in dead:
            self._opened.pop(key).close()
        return len(dead)

    def close(self) -> None:
        """Let go of all memory."""
        while self._opened:
            self._opened.popitem()[1].close()

    def _living_writer(self) -> bytes:
        """Return which publisher runs now, stopped or not; nothing where none does."""
        name = self._space.name(OWNER, 0, _INDEX)
        if not is_alive(self._space, name):
            return b""
        with self._space.attach(name) as segment:
            return bytes(segment.buf[:_TOKEN_BYTES])

    def _leased(self, name: str, version: PolicyVersion, writer: bytes) -> SnapshotLease | None:
        with contextlib.suppress(SegmentError):
            segment = self._space.attach(name, lease=True)
            length = int.from_bytes(segment.buf[:_HEAD_BYTES], "little")
            text = bytes(segment.buf[_HEAD_BYTES : _HEAD_BYTES + length])
            record = msgspec.msgpack.decode(text, type=SnapshotRecord) if length else None
            if record is not None and (record.version, record.writer) == (version, writer):
                return SnapshotLease(record, segment)
            segment.close()
        return None


def _claimed(space: ShmSpace) -> tuple[SegmentLock, bytes]:
    """Say that there is a publisher and which, and remove what one before has left."""
    with contextlib.suppress(SegmentExistsError):
        space.create(OWNER, 0, _INDEX, _TOKEN_BYTES).close()
    name = space.name(OWNER, 0, _INDEX)
    lock, writer = _locked(space, name), secrets.token_bytes(_TOKEN_BYTES)
    with space.attach(name, writable=True) as segment:
        segment.buf[:_TOKEN_BYTES] = writer
    for left in space.names(OWNER):
        if left.endswith(_BUFFER):
            space.unlink(left)
    return lock, writer


def _locked(space: ShmSpace, name: str) -> SegmentLock:
    """Take a lock that nobody keeps: a reader that looks whether a publisher lives has it for a moment."""
    until_s = time.monotonic() + _LOOK_S
    while (lock := space.try_lock(name)) is None:
        if time.monotonic() > until_s:
            raise PublisherActiveError(space.run_id)
        time.sleep(0.001)
    return lock
