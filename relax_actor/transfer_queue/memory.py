"""How much shared memory the rows take, and the way into files for what is too much.

A segment moves whole and keeps its name, so no reference to it changes: a reader that does not find it in
shared memory looks into the spill folder. The file is sparse: each array is at the offset it had.

Order of a move: write the file under a name nobody looks for, give it its name, unlink the segment. Whenever
the queue dies, each row is in memory, in a file, or in both; both is put right by the next incarnation.

Refused: one file for many segments, which would have to be compacted.
"""

import contextlib
import functools
import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.ids import GroupId
from relax_actor.protocol import TensorRef
from transport.shm import ShmSpace

LOW_FRAC = 0.75
"""Once the budget is exceeded, so much of it stays in memory: moving a little at every put costs more."""

TURN_BYTES = 64 << 20
"""What is moved before the queue answers its callers again."""

_FOLDER = "spill"
_UNFINISHED = ".unfinished"

Holding = tuple[GroupId, TensorRef]
"""An array that is needed, and the group it is for."""


class SpillError(RelaxError):
    """A segment could not be moved into a file; it is where it was."""

    def __init__(self, segment: str, need_bytes: int, fact: str) -> None:
        self.segment, self.need_bytes, self.fact = segment, need_bytes, fact
        super().__init__(
            f"{need_bytes} bytes of `{segment}` cannot be moved out of shared memory: {fact}"
            "\n\nhint: make room where the run folder is, or raise queue.max_size_gb"
        )


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What was moved in one turn."""

    segments: int
    moved_bytes: int
    memory_bytes: int  # what is left in memory
    is_enough: bool


def spill_space(run_id: str, run_dir: Path) -> ShmSpace:
    """Return where a run's rows are that memory had no room for."""
    return ShmSpace(run_id, run_dir / _FOLDER)


class Memory:
    """The queue's account of its segments; it also frees them.

    Args:
        space: the run's shared memory.
        spill: where segments go that are too much; its folder is made.
        budget_bytes: of arrays that stay in memory.
        holdings: what is needed, when a queue goes on where another one was.
    """

    def __init__(
        self, space: ShmSpace, spill: ShmSpace, budget_bytes: int, holdings: Iterable[Holding] = ()
    ) -> None:
        self._space, self._spill, self.budget_bytes = space, spill, budget_bytes
        self._bytes: dict[str, int] = {}
        self.nbytes = 0
        spill.root.mkdir(parents=True, exist_ok=True)
        needed = _by_segment(holdings)
        self._clear({*needed})
        for segment, refs in needed.items():
            if space.exists(segment):
                self.took(segment, refs)

    @property
    def is_over(self) -> bool:
        """Whether more is in memory than the budget."""
        return self.nbytes > self.budget_bytes

    def took(self, segment: str, refs: Iterable[TensorRef]) -> None:
        """Count a segment with all its arrays; again changes nothing."""
        if segment not in self._bytes:
            self._bytes[segment] = sum(map(ref_bytes, refs))
            self.nbytes += self._bytes[segment]

    def free(self, segment: str) -> None:
        """Unlink a segment, wherever it is."""
        if not self._uncount(segment):
            self._spill.unlink(segment)
        self._space.unlink(segment)

    def relieve(self, holdings: Iterable[Holding]) -> Moved:
        """Move what is served last into files, until enough is moved or a turn's worth.

        Raises:
            SpillError: there is no room for a file; whatever was moved before stays moved.
        """
        low = self.budget_bytes * LOW_FRAC
        segments = moved = 0
        needed = _by_segment(sorted(holdings, key=lambda holding: holding[0], reverse=True))
        for segment, refs in needed.items():
            if self.nbytes <= low or moved >= TURN_BYTES:
                break
            if segment in self._bytes:
                moved += self._move(segment, refs)
                segments += 1
        is_enough = moved < TURN_BYTES
        return Moved(segments=segments, moved_bytes=moved, memory_bytes=self.nbytes, is_enough=is_enough)

    def _move(self, segment: str, refs: list[TensorRef]) -> int:
        nbytes = self._bytes[segment]
        unfinished = self._spill.root / _UNFINISHED
        try:
            self._copy(segment, refs, unfinished)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise SpillError(segment, nbytes, error.strerror or str(error)) from error
        point("spilled")
        self._space.unlink(segment)
        self._uncount(segment)
        return nbytes

    def _copy(self, segment: str, refs: list[TensorRef], unfinished: Path) -> None:
        with self._space.attach(segment) as memory, unfinished.open("wb") as file:
            for ref in refs:
                file.seek(ref.offset)
                file.write(memory.buf[ref.offset : ref.offset + ref_bytes(ref)])
            point("spilling")
            file.truncate(max(1, *(ref.offset + ref_bytes(ref) for ref in refs)))
        unfinished.replace(self._spill.root / segment)

    def _uncount(self, segment: str) -> bool:
        """Return whether it was in memory."""
        nbytes = self._bytes.pop(segment, None)
        self.nbytes -= nbytes or 0
        return nbytes is not None

    def _clear(self, needed: set[str]) -> None:
        """Remove the files of rows that nobody needs, or that are in memory as well."""
        (self._spill.root / _UNFINISHED).unlink(missing_ok=True)
        for name in self._spill.names():
            if name not in needed or self._space.exists(name):
                self._spill.unlink(name)


def ref_bytes(ref: TensorRef) -> int:
    """Return the size of an array."""
    return _itemsize(ref.dtype) * math.prod(ref.shape)


@functools.cache
def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def remove_spilled(run_id: str, run_dir: Path) -> None:
    """Remove a run's spill folder, with what the queue left in it; a missing one is fine."""
    spill = spill_space(run_id, run_dir)
    with contextlib.suppress(OSError):
        (spill.root / _UNFINISHED).unlink(missing_ok=True)
        spill.sweep()
        spill.root.rmdir()


def _by_segment(holdings: Iterable[Holding]) -> dict[str, list[TensorRef]]:
    gathered: dict[str, list[TensorRef]] = {}
    for _, ref in holdings:
        gathered.setdefault(ref.segment, []).append(ref)
    return gathered
