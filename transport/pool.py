"""Warm memory for one writer: large segments used again and again, a name for everything written.

Making a segment costs system calls and a page fault for every 4 KiB, which is more than copying costs. So a
writer keeps *arenas*: segments whose pages are there and mapped. What it writes goes behind what it wrote
before, and gets a name of its own: a hard link to the arena. Whoever owns the name owns the bytes, exactly as
if they were a segment: it can be adopted, it is swept with its owner, unlinking it frees it.

The kernel counts: an arena whose only name is the arena's own has no bytes that anybody needs. It is written
again from its start, once no reader's lease holds it either (`transport.mappings`). When the writer dies its
arenas are swept like everything that it owns, and the memory goes with the last name that is left.

Invariants
- A name means the same bytes for as long as it exists, and no name is ever given twice.
- An arena that has lost its own name, because its owner was declared dead, is never written from its start
  again: the one name that is left may be a reader's.

Refused: a free list kept by the queue, which every death of a process would have to be told to.
"""

import fcntl
import os
from typing import Final, NamedTuple

from transport.segment import Segment, SegmentSpaceError
from transport.shm import ShmSpace

ALIGN_BYTES: Final = 64
"""Everything starts at a cache line."""

ARENA_BYTES: Final = 4 << 20
"""The usual arena; what is larger has one to itself."""

LEAST_BYTES: Final = 256 << 10
PIECES: Final = 8
"""What an arena is made for: as many pieces of the size that was asked for, within the bounds above."""

PATIENCE: Final = 4
"""An arena that was not needed while every arena could have been taken so often is given back."""


class Piece(NamedTuple):
    """Room to write into: `nbytes` of `segment` from `offset` on, to be known to others as `name`."""

    segment: Segment
    offset: int
    name: str


class _Arena:
    """One segment, and how much of it is written."""

    def __init__(self, space: ShmSpace, segment: Segment) -> None:
        self.segment = segment
        self.end = 0
        self.taken = 0
        self._path = space.root / segment.name
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def room_for(self, nbytes: int) -> bool:
        return self.end + nbytes <= self.segment.nbytes

    def is_free(self) -> bool:
        """Whether nothing in it has a name or a reader."""
        return os.fstat(self._fd).st_nlink == 1 and self._path.exists() and self._is_unread()

    def close(self) -> None:
        self.segment.close()
        os.close(self._fd)

    def _is_unread(self) -> bool:
        # Not kept: nobody can find the arena any more, and a reader that has it open already looks, once it
        # has its lease, whether the name is still there.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True


class SegmentPool:
    """Room in arenas that belong to one writer; one thread.

    Args:
        space: where they are.
        owner: whose they are; they are swept after its death.
        incarnation: of the owner.
    """

    def __init__(self, space: ShmSpace, owner: str, incarnation: int) -> None:
        self._space, self._owner, self._incarnation = space, owner, incarnation
        self._arenas: list[_Arena] = []
        self._current: _Arena | None = None
        self._made = self._named = self._turn = 0

    @property
    def nbytes(self) -> int:
        """What all arenas take together."""
        return sum(arena.segment.nbytes for arena in self._arenas)

    def place(self, nbytes: int) -> Piece:
        """Return room for `nbytes`, under a new name.

        Raises:
            SegmentSpaceError: the file system is full, also without the arenas that nothing is in.
            SegmentMissingError: the owner's segments were swept: others take it for dead.
            ValueError: `nbytes` is below 1.
        """
        if nbytes < 1:
            raise ValueError(f"a piece has at least one byte, not {nbytes}")
        arena = self._with_room(nbytes)
        self._named += 1
        label = f"rows{self._named}"
        name = self._space.link(arena.segment.name, self._owner, self._incarnation, label)
        offset = arena.end
        arena.end = _up(offset + nbytes, ALIGN_BYTES)
        return Piece(arena.segment, offset, name)

    def close(self) -> None:
        """Give up all arenas; what was written stays for as long as it has a name. Idempotent."""
        self._drop([*self._arenas])

    def _with_room(self, nbytes: int) -> _Arena:
        if self._current is None or not self._current.room_for(nbytes):
            self._turn += 1
            free = [arena for arena in self._arenas if arena.is_free()]
            self._current = self._again(free, nbytes) or self._new(nbytes)
            self._current.taken = self._turn
        return self._current

    def _again(self, free: list[_Arena], nbytes: int) -> _Arena | None:
        """Take the smallest arena that is large enough; give back what has not been needed for long."""
        large = [arena for arena in free if arena.segment.nbytes >= nbytes]
        chosen = min(large, key=lambda arena: arena.segment.nbytes, default=None)
        long_ago = self._turn - PATIENCE * len(self._arenas)
        self._drop([arena for arena in free if arena is not chosen and arena.taken < long_ago])
        if chosen is not None:
            chosen.end = 0
        return chosen

    def _new(self, nbytes: int) -> _Arena:
        wanted = _size(max(nbytes, min(ARENA_BYTES, max(LEAST_BYTES, PIECES * nbytes))))
        try:
            segment = self._created(wanted)
        except SegmentSpaceError:
            self._drop([arena for arena in self._arenas if arena.is_free()])
            segment = self._created(_up(nbytes, ALIGN_BYTES))
        arena = _Arena(self._space, segment)
        self._arenas.append(arena)
        return arena

    def _created(self, nbytes: int) -> Segment:
        self._made += 1
        return self._space.create(self._owner, self._incarnation, f"arena{self._made}", nbytes)

    def _drop(self, arenas: list[_Arena]) -> None:
        for arena in arenas:
            self._arenas.remove(arena)
            self._space.unlink(arena.segment.name)
            arena.close()
            if arena is self._current:
                self._current = None


def _size(nbytes: int) -> int:
    """Return the next of few sizes, at most a quarter larger: so that arenas fit what comes later."""
    return _up(nbytes, max(ALIGN_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 3)))


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
