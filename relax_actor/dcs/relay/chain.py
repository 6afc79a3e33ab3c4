"""Who pulls from whom, and what becomes of a version half way: decisions without I/O.

The chain is a list of stores, the trainer's host first. Each store decides for itself, by what it has seen:
it pulls from the nearest one before it that it does not suspect. So a store that hangs in the middle is
skipped by the one below it, and nobody has to agree. The first store is never given up.

Invariants
    1. Every store pulls from one nearer to the trainer, so there are no circles.
    2. A link has an epoch, higher than that of every link before it; what an older link says is refused.
    3. Versions never go back: only what is newer than everything here is begun.
    4. Of two versions begun in a row at least one is pulled to its end, as far as this store decides: else a
       trainer that publishes faster than half a pull would leave a host without any.
"""

from collections import deque
from collections.abc import Sequence

from relax_actor.dcs.manifest import Manifest
from relax_actor.ids import PolicyVersion

AHEAD_BYTES = 64 << 20
"""Buckets are asked for ahead up to this sum, and two at least: the link never waits for a question."""

ASKS = 2
"""How often a bucket may be asked for at one store before it is believed to be corrupt there."""


MAX_DOUBLINGS = 5
"""So often, at most, a suspicion becomes twice as long."""


class Chain:
    """The stores before this one, and which of them are suspected.

    Args:
        before: their names, the trainer's host's first.
        suspect_s: how long a first suspicion lasts; each further one in a row lasts twice as long.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, before: Sequence[str], *, suspect_s: float) -> None:
        if not before:
            raise ValueError("the first store of a chain has nobody to pull from")
        self._before, self._suspect_s = tuple(before), suspect_s
        self._suspected: dict[str, float] = {}  # until when
        self._failures: dict[str, int] = {}  # in a row
        self.epoch = 0

    def upstream(self, now: float) -> str:
        """Return the nearest store that is not suspected, the first one where all are."""
        for name in reversed(self._before):
            if self._suspected.get(name, now) <= now:
                return name
        return self._before[0]

    def next_epoch(self) -> int:
        """Begin a link; what is said on an older one does not count any more."""
        self.epoch += 1
        return self.epoch

    def suspect(self, name: str, now: float) -> bool:
        """Pull from another store for a while; return whether there is another."""
        failures = self._failures.get(name, 0)
        self._failures[name] = min(failures + 1, MAX_DOUBLINGS)
        self._suspected[name] = now + self._suspect_s * 2.0**failures
        return self.upstream(now) != name

    def rely_on_first(self, now: float) -> None:
        """Pull from the first store for a while: it is not known which of the others can be relied on."""
        for name in self._before[1:]:
            self._suspected[name] = max(self._suspected.get(name, now), now + self._suspect_s)

    def trust(self, name: str) -> None:
        """A whole version came from this store: its failures are forgotten."""
        self._failures.pop(name, None)
        self._suspected.pop(name, None)


def is_overtaken(
    *, here_bytes: int, total_bytes: int, newer_is_complete: bool, skipped_the_last: bool
) -> bool:
    """Decide whether a version that is being pulled gives way to a newer one.

    Args:
        here_bytes: how much of it is here.
        total_bytes: how much there is.
        newer_is_complete: whether the store above has a newer version, all of it.
        skipped_the_last: whether the version before gave way.
    """
    return newer_is_complete and 2 * here_bytes < total_bytes and not skipped_the_last


class Haul:
    """A version on its way here: which buckets are here, which are asked for, and what comes next.

    Attributes:
        manifest: what is pulled.
        here_bytes: how much of it is here and verified.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.here_bytes = 0
        self._todo = deque(range(len(manifest.buckets)))
        self._asked: deque[int] = deque()  # in the order in which they will come
        self._position = 0  # bytes of the first of them that are here
        self._damages: dict[int, int] = {}

    @property
    def version(self) -> PolicyVersion:
        """Which policy version it is."""
        return self.manifest.version

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        return not self._todo and not self._asked

    def wants(self) -> list[int]:
        """Return the buckets to ask for now, and count them as asked for."""
        buckets = self.manifest.buckets
        ahead_bytes = sum(buckets[index].nbytes for index in self._asked)
        wanted = []
        while self._todo and (len(self._asked) < 2 or ahead_bytes < AHEAD_BYTES):
            wanted.append(self._todo.popleft())
            self._asked.append(wanted[-1])
            ahead_bytes += buckets[wanted[-1]].nbytes
        return wanted

    def left_bytes(self, bucket: int, offset: int) -> int:
        """Return how much of a bucket is still to come, 0 if it is not what comes next, from there on."""
        if not self._asked or (bucket, offset) != (self._asked[0], self._position):
            return 0
        return self.manifest.buckets[bucket].nbytes - offset

    def received(self, nbytes: int) -> None:
        """So much more came of the bucket that is expected."""
        self._position += nbytes

    def arrived(self) -> None:
        """The bucket that was expected is here and verified."""
        self._position = 0
        self.here_bytes += self.manifest.buckets[self._asked.popleft()].nbytes

    def lacks(self, bucket: int) -> bool:
        """Whether a bucket is neither here nor asked for."""
        return bucket in self._todo

    def came(self, bucket: int) -> None:
        """A bucket that was not asked for is here and verified."""
        self._todo.remove(bucket)
        self.here_bytes += self.manifest.buckets[bucket].nbytes

    def damaged(self) -> bool:
        """The bucket that was expected is not what it should be; return whether to ask for it again."""
        self._position = 0
        index = self._asked.popleft()
        self._todo.appendleft(index)
        self._damages[index] = self._damages.get(index, 0) + 1
        return self._damages[index] < ASKS

    def relinked(self) -> None:
        """Nothing that was asked for will come: the link is another one."""
        self._position = 0
        self._todo = deque(sorted((*self._asked, *self._todo)))
        self._asked.clear()
        self._damages.clear()
