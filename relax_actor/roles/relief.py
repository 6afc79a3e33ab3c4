"""What the queue does when its rows are too many for memory."""

import msgspec

from relax_actor.telemetry import EventLog
from relax_actor.transfer_queue.ledger import Ledger
from relax_actor.transfer_queue.memory import Memory, SpillError


class Relief:
    """Moves rows into files, and says when nothing more is to be sampled.

    Args:
        memory: counts, and moves.
        ledger: knows which rows are needed last.
        events: told of what was moved, and of what could not be.
    """

    def __init__(self, memory: Memory, ledger: Ledger, events: EventLog) -> None:
        self._memory, self._ledger, self._events = memory, ledger, events
        self._is_crowded = False  # over its budget, and no file can be written

    @property
    def must_wait(self) -> bool:
        """Whether to sample nothing more for now: the trainer has what it needs to make room."""
        return self._is_crowded and self._ledger.has_batch()

    def relieve(self) -> bool:
        """Move a turn's worth, if memory is too full; return False where there is more to do."""
        if not self._memory.is_over:
            self._is_crowded = False
            return True
        try:
            moved = self._memory.relieve(self._ledger.holdings())
        except SpillError as error:
            if not self._is_crowded:
                self._events.emit("spill_failed", reason=str(error), memory_bytes=self._memory.nbytes)
            self._is_crowded = True
            return True
        self._is_crowded = False
        if moved.segments:
            self._events.emit("rows_spilled", **msgspec.structs.asdict(moved))
        return moved.is_enough
