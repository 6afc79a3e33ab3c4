"""Memory of retired policy versions, kept warm for the next one.

Pages that a process touches for the first time cost several times what copying into them does, so buckets
are rewritten in place where nobody reads them any more.
"""

from transport.shm import Segment, SegmentLock, SegmentMissingError, ShmSpace


class SegmentPool:
    """Segments nobody can find any more: the manifest that named them is gone."""

    def __init__(self, space: ShmSpace) -> None:
        self._space = space
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        return sum(segment.nbytes for segment in self._segments)

    def add(self, segments: list[Segment]) -> None:
        """Take over the segments of a retired version."""
        self._segments.extend(segments)

    def take(self, nbytes: int) -> tuple[Segment, SegmentLock] | None:
        """Hand out a segment of exactly `nbytes`, locked; None where all such have readers.

        One with readers is let go of: they keep their mapping, and the kernel frees it after them.
        """
        for segment in [held for held in self._segments if held.nbytes == nbytes]:
            self._segments.remove(segment)
            lock = self._try_lock(segment)
            if lock is not None:
                return segment, lock
            self._release(segment)
        return None

    def drop(self) -> None:
        """Let go of everything."""
        while self._segments:
            self._release(self._segments.pop())

    def _try_lock(self, segment: Segment) -> SegmentLock | None:
        try:
            return self._space.try_lock(segment.name)
        except SegmentMissingError:  # somebody swept the run's memory
            return None

    def _release(self, segment: Segment) -> None:
        self._space.unlink(segment.name)
        segment.close()
