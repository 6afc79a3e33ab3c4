"""One word of shared memory: which policy version is the newest.

Readers look at it between two decode steps, so a look is a load from mapped memory. It is a hint that is
never ahead: it is stored after the manifest has its final name, and whoever opens a version checks it anyway.
The segment also carries the lock that makes its holder the run's only publisher.
"""

from relax_actor.errors import RelaxError
from relax_actor.ids import PolicyVersion
from transport.shm import Segment, SegmentLock, SegmentMissingError, ShmSpace

_OWNER = "dcs-latest"
_LABEL = "word"
_NBYTES = 64  # a cache line of its own


class PublisherActiveError(RelaxError):
    """Another publisher of this run is alive, and two would tear each other's versions."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(
            f"run {run_id} has a policy publisher already"
            "\n\nhint: close the old publisher, or let its process end, before making another"
        )


class LatestReader:
    """The reading side; it may be made before there is a publisher."""

    def __init__(self, space: ShmSpace) -> None:
        self._space = space
        self._name = space.name(_OWNER, 0, _LABEL)
        self._word: memoryview | None = None

    def load(self) -> PolicyVersion | None:
        """Return the newest published version, None before the first."""
        if self._word is None and not self._attached():
            return None
        return _version(self._word)

    def _attached(self) -> bool:
        try:
            self._word = _word(self._space.attach(self._name))
        except SegmentMissingError:
            return False
        return True


class LatestWriter:
    """The writing side, of which a run has one at a time.

    Raises:
        PublisherActiveError: there is one already.
    """

    def __init__(self, space: ShmSpace) -> None:
        self._space = space
        self._name = space.name(_OWNER, 0, _LABEL)
        self._locks: list[SegmentLock] = []
        self._words: list[memoryview] = []
        self._make()

    def load(self) -> PolicyVersion | None:
        """Return the newest published version, None before the first."""
        return _version(self._words[-1])

    def store(self, version: PolicyVersion) -> None:
        """Say that `version`, which is complete, is the newest.

        Where somebody swept the run's memory, both are told: who looks at the old word, and who comes anew.
        """
        if not self._space.exists(self._name):
            self._make()
        for word in self._words:
            word[0] = version + 1

    def close(self) -> None:
        """Let another publisher follow. Idempotent."""
        for lock in self._locks:
            lock.close()

    def _make(self) -> None:
        segment = _attached_or_made(self._space, self._name)
        lock = self._space.try_lock(self._name)
        if lock is None:
            raise PublisherActiveError(self._space.run_id)
        self._locks.append(lock)
        self._words.append(_word(segment))


def _attached_or_made(space: ShmSpace, name: str) -> Segment:
    try:
        return space.attach(name, writable=True)
    except SegmentMissingError:
        space.unlink(name)  # a death while it was made can leave a name without bytes
        return space.create(_OWNER, 0, _LABEL, _NBYTES)


def _word(segment: Segment) -> memoryview:
    return segment.buf.cast("Q")  # one aligned 64-bit load or store an access


def _version(word: memoryview | None) -> PolicyVersion | None:
    count = word[0] if word else 0  # a new segment is zeros, so 0 is "none" and n + 1 is version n
    return PolicyVersion(count - 1) if count else None
