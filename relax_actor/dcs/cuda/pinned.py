"""Segments of shared memory that are page-locked, each once, for as long as it is rewritten again and again.

Page-locking takes 50 ms a GiB, and buckets of a retired policy version are rewritten in place under a new
name: so a segment is known by its inode here, and stays locked from version to version. The mapping holds no
lease; whoever copies out of it holds one of his own for as long.
"""

import threading

import numpy as np
import torch
from torch import Tensor

from relax_actor.dcs.cuda.device import Gpus, Pinned
from transport.shm import Segment, SegmentMissingError, ShmSpace


class PinnedSegment:
    """A segment that is page-locked at its first use.

    Args:
        segment: mapped for writing, without a lease.
        gpus: what locks it.
    """

    def __init__(self, segment: Segment, gpus: Gpus) -> None:
        self._segment, self._gpus = segment, gpus
        self._lock = threading.Lock()
        self._pinned: Pinned | None = None
        self._data: Tensor | None = torch.from_numpy(segment.ndarray(np.uint8, (segment.nbytes,)))

    @property
    def is_pinned(self) -> bool:
        """Whether it is page-locked already."""
        return self._pinned is not None

    @property
    def buf(self) -> memoryview:
        """All of it, page-locked or not."""
        return self._segment.buf

    def data(self) -> Tensor:
        """Return all of it, uint8 [n], page-locked.

        Raises:
            DeviceError: the driver refuses.
        """
        with self._lock:
            if self._data is None:
                raise ValueError(f"page-locked segment `{self._segment.name}` is closed")
            if self._pinned is None:
                self._pinned = self._gpus.pin(self._data.data_ptr(), self._segment.nbytes)
            return self._data

    def close(self) -> None:
        """Unlock and unmap it. Idempotent."""
        with self._lock:
            if self._pinned is not None:
                self._pinned.close()
            self._pinned = self._data = None
            self._segment.close()


class PinnedPool:
    """All segments of a run that this process has page-locked. Safe to use from several threads.

    Args:
        space: the run's shared memory.
        gpus: what locks.
    """

    def __init__(self, space: ShmSpace, gpus: Gpus) -> None:
        self._space, self._gpus = space, gpus
        self._lock = threading.Lock()
        self._segments: dict[int, PinnedSegment] = {}  # by inode: all are in one directory

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, name: str) -> PinnedSegment:
        """Return a segment, mapped; it is page-locked when its data is asked for.

        Raises:
            SegmentMissingError: there is none of this name.
        """
        with self._lock:
            inode = self._inode(name)
            if inode not in self._segments:
                segment = self._space.attach(name, writable=True)
                if self._inode(name) != inode:  # exchanged meanwhile
                    segment.close()
                    raise SegmentMissingError(name)
                self._segments[inode] = PinnedSegment(segment, self._gpus)
            return self._segments[inode]

    def trim(self, owner: str) -> int:
        """Unlock what no segment of `owner` is any more; return how many went."""
        with self._lock:
            living = self._living(owner)
            gone = [inode for inode in self._segments if inode not in living]
            for inode in gone:
                self._segments.pop(inode).close()
            return len(gone)

    def close(self) -> None:
        """Unlock everything."""
        with self._lock:
            while self._segments:
                self._segments.popitem()[1].close()

    def _inode(self, name: str) -> int:
        try:
            return (self._space.root / name).stat().st_ino
        except FileNotFoundError as error:
            raise SegmentMissingError(name) from error

    def _living(self, owner: str) -> set[int]:
        found = set()
        for name in self._space.names(owner):
            try:
                found.add(self._inode(name))
            except SegmentMissingError:  # renamed a moment ago: it may live, so nothing is certain
                return set(self._segments)
        return found
