"""Leased segments whose mappings are kept for the next time.

Mapping a segment anew costs more than copying it: the kernel fills the page table page by page at the first
touch. Whoever reads the same segments again and again keeps their mappings here, and takes a lease for as
long as it reads. A mapping goes when its segment has no name any more, which is looked at before every lease.
"""

import fcntl
import mmap
import os
import threading
import weakref
from typing import Final, NamedTuple

from transport.segment import Segment, SegmentBusyError, SegmentMissingError
from transport.shm import ShmSpace

KEPT: Final = 64
"""Mappings that are kept; a further segment is mapped for one lease only. Each takes two descriptors."""


class _Kept(NamedTuple):
    mapping: mmap.mmap
    descriptor: int  # of its own: the lock of a lease is another one's

    @property
    def is_named(self) -> bool:
        """Whether others can still find the segment."""
        return os.fstat(self.descriptor).st_nlink > 0


class Mappings:
    """The segments that one process reads again and again; any thread.

    Args:
        space: where they are.
    """

    def __init__(self, space: ShmSpace) -> None:
        self._space = space
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], _Kept] = {}  # by inode and length

    def __len__(self) -> int:
        return len(self._kept)

    def lease(self, name: str) -> Segment:
        """Map a segment for reading; `try_lock` is refused until the segment is closed and no view lives.

        Raises:
            SegmentMissingError: there is none, or it is still being made.
            SegmentBusyError: somebody holds its lock.
        """
        if len(self._kept) >= KEPT:
            return self._space.attach(name, lease=True)
        try:
            lock = os.open(self._space.root / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SegmentMissingError(name) from error
        try:
            return self._leased(name, lock)
        except BaseException:
            os.close(lock)
            raise

    def trim(self) -> None:
        """Give up what nobody can find any more; its memory goes with the last view."""
        with self._lock:
            for key, kept in list(self._kept.items()):
                if not kept.is_named:
                    del self._kept[key]
                    os.close(kept.descriptor)

    def close(self) -> None:
        """Give up everything; leased segments stay as they are. Idempotent."""
        with self._lock:
            while self._kept:
                os.close(self._kept.popitem()[1].descriptor)

    def __del__(self) -> None:
        self.close()

    def _leased(self, name: str, lock: int) -> Segment:
        import numpy as np  # noqa: PLC0415 - as in segment.py

        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SegmentBusyError(name) from error
        mapping = self._mapping(name, lock)
        # The lease ends with this array: views hold on to it, and it does not end the mapping.
        held = np.frombuffer(mapping, np.uint8)
        weakref.finalize(held, os.close, lock)
        return Segment(name, mapping, held.data)

    def _mapping(self, name: str, lock: int) -> mmap.mmap:
        stat = os.fstat(lock)
        if stat.st_size == 0:
            raise SegmentMissingError(name)
        key = stat.st_ino, stat.st_size
        with self._lock:
            if key not in self._kept:
                descriptor = os.open(f"/proc/self/fd/{lock}", os.O_RDONLY | os.O_CLOEXEC)
                mapping = mmap.mmap(descriptor, stat.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self._kept[key] = _Kept(mapping, descriptor)
            return self._kept[key].mapping
