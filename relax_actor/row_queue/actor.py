"""The process of a row queue: parks those who wait, adopts what is put, keeps the table's word in a journal.

All decisions are the table's. Rows stay where their producers wrote them; a put renames their memory to the
queue, so that its producer's death does not take it away.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from relax_actor.actor import Actor, endpoint
from relax_actor.faults import point
from relax_actor.ids import Holder, LeaseId
from relax_actor.row_queue.answers import Leased, PutAnswer, Wanted, Where
from relax_actor.row_queue.holding import RETRY_S, Holding, moved, moved_shared
from relax_actor.row_queue.log import Log
from relax_actor.row_queue.records import Columns, Ranges, RowsLeased, SharedPut
from relax_actor.row_queue.spec import QueueSpec
from relax_actor.row_queue.table import Table
from relax_actor.transfer_queue.journal import JournalSpaceError
from relax_actor.transfer_queue.records import Put

R = TypeVar("R")

MANY = 4096
"""Callers that may be parked in one endpoint."""

PARKED_S = 50e-6
"""What is answered sooner was not waited for."""

TICK_S = 1.0


class RowQueue(Actor):
    """A row queue.

    Args:
        spec: its fields and consumer groups.
        dock: the actor beside this one (`roles.dock.RowDock`) that carries rows of other hosts; empty: none.
        journal_dir: where the journal is; empty: the run's folder.

    Raises:
        ConfigError: a queue that cannot be, or that has more memory than there is.
        JournalSpaceError: there is no room for a journal.
    """

    def __init__(self, spec: QueueSpec, dock: str = "", journal_dir: str = "") -> None:
        spec.check()
        self._spec, self._where = spec, Where(self.ctx.host, dock)
        name = f"{self.ctx.name.replace('/', '-')}-{self.ctx.run_id}.rows"
        self._log = Log(Path(journal_dir or self.ctx.run_dir) / name, self._say_full)
        self._table = Table.replay(spec, self._log.past)
        self._log.past.clear()
        self._holding = Holding(self.ctx, spec, self._table)
        self._changed = asyncio.Event()
        self._ticked = time.monotonic()

    @endpoint(idempotent=True)
    def where(self) -> Where:
        """Say where the rows are."""
        return self._where

    # -- producers ------------------------------------------------------------------------------

    @endpoint(idempotent=True, concurrency=MANY)
    async def put(  # noqa: PLR0917 - one message
        self,
        producer: Holder,
        seq: int,
        columns: Columns,
        keys: list[int],
        group_rows: int,
        shared: SharedPut | None = None,
    ) -> PutAnswer:
        """Take rows; answered when there is room for the next ones.

        Raises:
            ValueError: see `Table.put`.
        """
        await self._written()
        known = self._table.known(producer, seq)
        if known is None:
            names = self._holding.adopt([columns, shared.columns if shared else {}])
            if names is None:
                return PutAnswer(Put.STALE, 0)
            mine, common = moved(columns, names), shared and moved_shared(shared, names)
            with self._holding.freed_unless_taken(names, mine, common.columns if common else {}):
                known = self._table.put(producer, seq, mine, keys, group_rows, common)
            self._notify()
            point("rows_put")
        await self._until(lambda: None if self._is_full() else True, None)
        await self._written()
        return PutAnswer(*known)

    @endpoint(idempotent=True, concurrency=MANY)
    async def append(self, producer: Holder, seq: int, rows: Ranges, columns: Columns) -> Put:
        """Take further fields of rows; see `Table.append`."""
        await self._written()
        known = self._table.known(producer, seq)
        if known is not None:
            return known[0]
        names = self._holding.adopt([columns])
        if names is None:
            return Put.STALE
        mine = moved(columns, names)
        with self._holding.freed_unless_taken(names, mine):
            outcome = self._table.append(producer, seq, rows, mine)
        self._notify()
        point("fields_put")
        await self._written()
        return outcome

    @endpoint(idempotent=True)
    def rows_put_by(self, name: str) -> int:
        """Return how many rows all incarnations of a producer have put: where its next one goes on."""
        return self._table.rows_put_by(name)

    @endpoint(idempotent=True, concurrency=MANY)
    async def drop(self, rows: Ranges, reason: str) -> None:
        """Give rows up for all groups."""
        await self._written()
        self._table.drop(rows, reason)
        self._notify()
        await self._written()

    @endpoint(idempotent=True, concurrency=MANY)
    async def end_stream(self) -> None:
        """No further rows come, from nobody: what is left is dealt, and what is no whole group is dropped."""
        await self._written()
        self._table.end_stream()
        self._notify()
        await self._written()

    # -- consumers ------------------------------------------------------------------------------

    @endpoint(concurrency=MANY)
    async def lease(self, wanted: Wanted) -> Leased:
        """Lend rows, as soon as there are some, or none after `wanted.wait_s`.

        Raises:
            ValueError: no such group or rank.
        """
        holder, group = wanted.holder, wanted.group
        await self._written()
        acked = self._table.ack(wanted.acks, holder)
        self._table.retain(holder, wanted.held, group)
        if wanted.acks:
            self._notify()
            point("rows_acked")

        asked = time.monotonic()

        def look() -> Leased | None:
            if self._log.is_behind:
                return None
            now = time.monotonic()
            dealt = self._table.lease(group, holder, wanted.max_rows, now, rank=wanted.rank)
            if dealt is None and not self._table.is_finished:
                return None
            return Leased(dealt, acked, dealt is None, now - asked > PARKED_S)

        found = await self._until(look, wanted.wait_s)
        await self._written()
        point("rows_leased")
        return found or Leased(None, acked, is_finished=False, was_parked=True)

    @endpoint(idempotent=True, concurrency=MANY)
    async def ack(self, holder: Holder, lease_ids: list[LeaseId]) -> list[Put]:
        """Settle leased rows."""
        await self._written()
        outcomes = self._table.ack(lease_ids, holder)
        self._notify()
        point("rows_acked")
        await self._written()
        return outcomes

    @endpoint(idempotent=True, concurrency=MANY)
    async def give_back(self, holder: Holder, group: str) -> None:
        """Take back all that somebody who goes has not acknowledged."""
        await self._written()
        self._table.retain(holder, [], group)
        self._notify()
        await self._written()

    @endpoint(idempotent=True)
    def progress(self, group: str) -> dict[str, int]:
        """Return where all rows are for a group; see `Table.progress`."""
        return self._table.progress(group)

    # -- time and deaths ------------------------------------------------------------------------

    def step(self) -> float | None:
        """End what is overdue, free what nobody needs, keep within memory, shorten the journal."""
        now = time.monotonic()
        if self._log.is_behind:
            self._notify()
            if self._log.is_behind:
                self._log.compact(self._table.snapshot)
                return RETRY_S
        if self._table.expire(now):
            self._notify()
        self._free()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._log.compact(self._table.snapshot)
            for group in self._spec.groups:
                self.ctx.events.emit("rows", group=group.name, **self._table.progress(group.name))
        was_crowded = self._holding.is_crowded
        is_enough = self._holding.relieve()
        if was_crowded and not self._holding.is_crowded:
            self._notify()
        if not is_enough:
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
        if not self._log.is_behind:  # or whoever writes the rest down has to tell others of it
            self._commit()
        return found

    def _notify(self) -> None:
        """Write down what was decided before anybody is told, and let the parked look again."""
        if not self._commit():
            return
        self._free()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _written(self) -> None:
        """Wait until everything that was decided is written down."""
        while self._log.is_behind:
            await self._changed.wait()

    def _commit(self) -> bool:
        events = self._table.take_events()
        if not events and not self._log.is_behind:
            return True
        point("rows_decided")
        is_written = self._log.write(events)
        point("rows_committed")
        if not is_written or any(isinstance(event, RowsLeased) for event in events):
            self.ctx.wake()  # a deadline may have come nearer
        return is_written

    def _say_full(self, error: JournalSpaceError) -> None:
        self.ctx.events.emit("journal_full", reason=str(error), need_bytes=error.need_bytes)

    def _free(self) -> None:
        self._holding.free()
        for dropped in self._table.take_dropped():
            self.ctx.events.emit("rows_dropped", **msgspec.structs.asdict(dropped))

    def _is_full(self) -> bool:
        limit = self._spec.max_rows
        is_full = self._holding.is_crowded or bool(limit and self._table.resident_rows >= limit)
        return is_full and not self._table.is_held_back
