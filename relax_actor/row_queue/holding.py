"""The memory of the rows that a queue has: taken over from producers, moved into files, freed."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from relax_actor.actor import Context
from relax_actor.errors import ConfigError
from relax_actor.faults import point
from relax_actor.row_queue.records import Columns, SharedPut
from relax_actor.row_queue.spec import QueueSpec
from relax_actor.row_queue.table import Table
from relax_actor.transfer_queue.memory import Memory, SpillError, spill_space
from transport.shm import SegmentMissingError, ShmSpace

OWNER: Final = "rowq"
"""Who owns adopted segments: not an actor, so that no actor's death sweeps them."""

ORPHAN_S: Final = 60.0
"""What a queue that died had taken over and not written down is kept so long for who sends it again."""

RETRY_S: Final = 0.1
"""How often what had no room is tried again."""


class Holding:
    """See the module.

    Args:
        context: of the queue.
        spec: says how much it may be.
        table: says what is needed.

    Raises:
        ConfigError: there is less memory than the queue may use.
    """

    def __init__(self, context: Context, spec: QueueSpec, table: Table) -> None:
        check_memory(spec, context.shm_root)
        self._table, self._events = table, context.events
        self._space = ShmSpace(context.run_id, context.shm_root)
        spill = spill_space(context.run_id, context.run_dir)
        self._memory = Memory(self._space, spill, spec.max_bytes, table.holdings())
        self._orphans = set(self._space.names(OWNER)) - table.segments()
        self._began = self._tried = time.monotonic()
        self.is_crowded = False
        """Whether there is too much, and no room in files either."""

    def adopt(self, columns: Iterable[Columns]) -> dict[str, str] | None:
        """Take over the memory of a put; None where it is not there: a repetition, or its writer is dead.

        Returns:
            The new names of its segments.
        """
        names: dict[str, str] = {}
        for segment in {column.segment for each in columns for column in each.values()}:
            try:
                names[segment] = self._space.adopt(segment, OWNER, 1)
            except SegmentMissingError:
                return None
            self._orphans.discard(names[segment])
        point("rows_adopted")
        return names

    @contextlib.contextmanager
    def freed_unless_taken(self, names: dict[str, str], *columns: Columns) -> Iterator[None]:
        """Count the memory of a put that is needed after the block, by whatever end, and free the rest."""
        try:
            yield
        finally:
            all_columns = [column for each in columns for column in each.values()]
            for segment in names.values():
                if self._table.needs(segment):
                    refs = [column.ref() for column in all_columns if column.segment == segment]
                    self._memory.took(segment, refs)
                else:
                    self._memory.free(segment)

    def free(self) -> None:
        """Free what nobody needs any more."""
        for segment in self._table.take_freed():
            self._memory.free(segment)
        if self._orphans and time.monotonic() - self._began > ORPHAN_S:
            for segment in self._orphans:
                self._space.unlink(segment)
            self._orphans.clear()

    def relieve(self) -> bool:
        """Move rows into files where they are too many; return False where there is more to do."""
        if not self._memory.is_over:
            self.is_crowded = False
            return True
        now = time.monotonic()
        if self.is_crowded and now - self._tried < RETRY_S:
            return True
        self._tried = now
        try:
            moved = self._memory.relieve(self._table.holdings())
        except SpillError as error:
            if not self.is_crowded:
                self._events.emit("spill_failed", reason=str(error), memory_bytes=self._memory.nbytes)
            self.is_crowded = True
            return True
        self.is_crowded = False
        return moved.is_enough


def check_memory(spec: QueueSpec, root: str) -> None:
    """Check before anything starts that there can be as much memory as the queue may use.

    Raises:
        ConfigError: there cannot.
    """
    stat = os.statvfs(root)
    nbytes = stat.f_blocks * stat.f_frsize
    if spec.max_bytes > nbytes:
        fact = f"is {spec.max_bytes}, and {root} has {nbytes} bytes in all"
        raise ConfigError("max_bytes", fact, "lower max_bytes, or give the supervisor a larger shm_root")


def moved(columns: Columns, names: dict[str, str]) -> Columns:
    """Return columns whose segments have other names now."""
    return {
        name: msgspec.structs.replace(column, segment=names[column.segment])
        for name, column in columns.items()
    }


def moved_shared(shared: SharedPut, names: dict[str, str]) -> SharedPut:
    """Return what rows have in common, likewise."""
    return SharedPut(shared.keys, moved(shared.columns, names), shared.gone)
