"""The process of a row queue: parks those who wait, adopts what is put, keeps the table's word in a journal.

All decisions are the table's. Rows stay where their producers wrote them; a put renames their memory to the
queue, so that its producer's death does not take it away.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from relax_actor.actor import Actor, endpoint
from relax_actor.faults import point
from relax_actor.ids import Holder, LeaseId
from relax_actor.row_queue.records import (
    Columns,
    Dealt,
    Event,
    Ranges,
    RowsLeased,
    decode_events,
    encode_events,
)
from relax_actor.row_queue.spec import QueueSpec
from relax_actor.row_queue.table import Table
from relax_actor.transfer_queue.journal import Journal, read
from relax_actor.transfer_queue.memory import Memory, SpillError, spill_space
from relax_actor.transfer_queue.records import Put
from transport.shm import SegmentMissingError, ShmSpace

R = TypeVar("R")

OWNER = "rowq"
"""Who owns adopted segments: not an actor, so that no actor's death sweeps them."""

MANY = 4096
"""Callers that may be parked in one endpoint."""

PARKED_S = 50e-6
"""What is answered sooner was not waited for."""

TICK_S = 1.0
COMPACT_BYTES = 16 << 20
"""A journal as long as this is replaced by a snapshot, where that is much shorter."""


class PutAnswer(msgspec.Struct, frozen=True):
    """Queue to producer: what became of a put."""

    outcome: Put
    first: int  # the number of the first row


class Wanted(msgspec.Struct, frozen=True):
    """Consumer to queue: what it wants, and what it has."""

    group: str
    holder: Holder
    max_rows: int  # not looked at where the sampler deals turns
    rank: int  # which data-parallel rank, where it does
    held: list[LeaseId]  # others of its own were lost on their way, and are taken back
    acks: list[LeaseId]  # what it is done with
    wait_s: float


class Leased(msgspec.Struct, frozen=True):
    """Queue to consumer: rows, and what became of what it acknowledged."""

    dealt: Dealt | None
    acked: list[Put]
    is_finished: bool  # no row will ever come
    was_parked: bool  # the rows were not there when they were asked for


class RowQueue(Actor):
    """A row queue.

    Args:
        spec: its fields and consumer groups.
        storage_path: the folder of shared memory.
    """

    def __init__(self, spec: QueueSpec, storage_path: str = "/dev/shm") -> None:  # noqa: S108 - shared memory
        spec.check()
        self._spec = spec
        self._space = ShmSpace(self.ctx.run_id, storage_path)
        name = f"{self.ctx.name.replace('/', '-')}-{self.ctx.run_id}.rows"
        past = list(read(self.ctx.run_dir / name, decode_events))
        self._table = Table.replay(spec, past)
        self._journal: Journal[Event] = Journal(self.ctx.run_dir / name, encode=encode_events)
        spill = spill_space(self.ctx.run_id, self.ctx.run_dir)
        self._memory = Memory(self._space, spill, spec.max_bytes, self._table.holdings())
        self._changed = asyncio.Event()
        self._is_crowded = False
        self._compacted_bytes = self._journal.nbytes
        # What a put of an earlier incarnation renamed, before it was written down: it may be sent again.
        self._orphans = set(self._space.names(OWNER)) - self._table.segments()
        self._ticked = time.monotonic()

    # -- producers ------------------------------------------------------------------------------

    @endpoint(idempotent=True, concurrency=MANY)
    async def put(
        self, producer: Holder, seq: int, columns: Columns, keys: list[int], group_rows: int
    ) -> PutAnswer:
        """Take rows; answered when there is room for the next ones.

        Raises:
            ValueError: see `Table.put`.
        """
        known = self._table.known(producer, seq)
        if known is None:
            adopted = self._adopted(columns)
            if adopted is None:
                return PutAnswer(Put.STALE, 0)
            known = self._table.put(producer, seq, adopted, keys, group_rows)
            self._took(adopted)
            self._notify()
            point("rows_put")
        await self._until(lambda: None if self._is_full() else True, None)
        return PutAnswer(*known)

    @endpoint(idempotent=True)
    def append(self, producer: Holder, seq: int, rows: Ranges, columns: Columns) -> Put:
        """Take further fields of rows; see `Table.append`."""
        known = self._table.known(producer, seq)
        if known is not None:
            return known[0]
        adopted = self._adopted(columns)
        if adopted is None:
            return Put.STALE
        outcome = self._table.append(producer, seq, rows, adopted)
        self._took(adopted)
        self._notify()
        point("fields_put")
        return outcome

    @endpoint(idempotent=True)
    def rows_put_by(self, name: str) -> int:
        """Return how many rows all incarnations of a producer have put: where its next one goes on."""
        return self._table.rows_put_by(name)

    @endpoint(idempotent=True)
    def drop(self, rows: Ranges, reason: str) -> None:
        """Give rows up for all groups."""
        self._table.drop(rows, reason)
        self._notify()

    @endpoint(idempotent=True)
    def end_stream(self) -> None:
        """No further rows come."""
        self._table.end_stream()
        self._notify()

    # -- consumers ------------------------------------------------------------------------------

    @endpoint(concurrency=MANY)
    async def lease(self, wanted: Wanted) -> Leased:
        """Lend rows, as soon as there are some, or none after `wanted.wait_s`.

        Raises:
            ValueError: no such group or rank.
        """
        holder, group = wanted.holder, wanted.group
        acked = self._table.ack(wanted.acks, holder)
        self._table.retain(holder, wanted.held, group)
        if wanted.acks:
            self._notify()
            point("rows_acked")

        asked = time.monotonic()

        def look() -> Leased | None:
            now = time.monotonic()
            dealt = self._table.lease(group, holder, wanted.max_rows, now, rank=wanted.rank)
            if dealt is None and not self._table.is_finished:
                return None
            return Leased(dealt, acked, dealt is None, now - asked > PARKED_S)

        found = await self._until(look, wanted.wait_s)
        point("rows_leased")
        return found or Leased(None, acked, is_finished=False, was_parked=True)

    @endpoint(idempotent=True)
    def ack(self, holder: Holder, lease_ids: list[LeaseId]) -> list[Put]:
        """Settle leased rows."""
        outcomes = self._table.ack(lease_ids, holder)
        self._notify()
        return outcomes

    @endpoint(idempotent=True)
    def progress(self, group: str) -> dict[str, int]:
        """Return where all rows are for a group; see `Table.progress`."""
        return self._table.progress(group)

    # -- time and deaths ------------------------------------------------------------------------

    def step(self) -> float | None:
        """End what is overdue, free what nobody needs, keep within memory, shorten the journal."""
        now = time.monotonic()
        if self._table.expire(now):
            self._notify()
        self._free()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._compact()
            for group in self._spec.groups:
                self.ctx.events.emit("rows", group=group.name, **self._table.progress(group.name))
        if not self._relieve():
            return 0.0
        deadline = self._table.next_deadline()
        return TICK_S if deadline is None else min(TICK_S, max(0.001, deadline - now))

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """Take back what a dead incarnation held, at once."""
        self._table.holder_gone(name, incarnation)
        self._notify()

    # -- inside ---------------------------------------------------------------------------------

    async def _until(self, look: Callable[[], R | None], wait_s: float | None) -> R | None:
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while (found := look()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        self._commit()
        return found

    def _notify(self) -> None:
        """Write down what was decided before anybody is told, and let the parked look again."""
        self._commit()
        self._free()
        self._changed.set()
        self._changed = asyncio.Event()

    def _commit(self) -> None:
        events = self._table.take_events()
        if not events:
            return
        point("rows_decided")
        self._journal.append(events)
        self._journal.commit()
        point("rows_committed")
        if any(isinstance(event, RowsLeased) for event in events):
            self.ctx.wake()  # a deadline may have come nearer

    def _adopted(self, columns: Columns) -> Columns | None:
        """Take over the memory of a put; None where it is not there: a repetition, or its writer is dead."""
        names: dict[str, str] = {}
        for segment in {column.segment for column in columns.values()}:
            try:
                names[segment] = self._space.adopt(segment, OWNER, 1)
            except SegmentMissingError:
                return None
            self._orphans.discard(names[segment])
        point("rows_adopted")
        return {
            name: msgspec.structs.replace(column, segment=names[column.segment])
            for name, column in columns.items()
        }

    def _took(self, columns: Columns) -> None:
        needed = self._table.segments()
        by_segment: dict[str, list[str]] = {}
        for name, column in columns.items():
            by_segment.setdefault(column.segment, []).append(name)
        for segment, names in by_segment.items():
            if segment in needed:
                self._memory.took(segment, [columns[name].ref() for name in names])
            else:
                self._memory.free(segment)

    def _free(self) -> None:
        for segment in self._table.take_freed():
            self._memory.free(segment)
        for dropped in self._table.take_dropped():
            self.ctx.events.emit("rows_dropped", **msgspec.structs.asdict(dropped))

    def _is_full(self) -> bool:
        limit = self._spec.max_rows
        return self._is_crowded or bool(limit and self._table.resident_rows >= limit)

    def _relieve(self) -> bool:
        """Move rows into files where they are too many; return False where there is more to do."""
        if not self._memory.is_over:
            if self._is_crowded:
                self._is_crowded = False
                self._notify()
            return True
        try:
            moved = self._memory.relieve(self._table.holdings())
        except SpillError as error:
            if not self._is_crowded:
                self.ctx.events.emit("spill_failed", reason=str(error), memory_bytes=self._memory.nbytes)
            self._is_crowded = True
            return True
        self._is_crowded = False
        return moved.is_enough

    def _compact(self) -> None:
        """Replace a long journal by what is left of it; forget what nobody sent again."""
        for segment in self._orphans:
            self._space.unlink(segment)
        self._orphans.clear()
        if self._journal.nbytes < 2 * self._compacted_bytes + COMPACT_BYTES:
            return
        self._journal.rewrite(self._table.snapshot())
        self._compacted_bytes = self._journal.nbytes
