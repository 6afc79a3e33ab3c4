"""The decisions of a row queue: who gets which rows, and what became of everything. Pure.

No method waits, does I/O or looks at a clock: `now` is always handed in. Each decision is an event, and what
it does is in `state`, so that the events of a journal make the same table again.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

from relax_actor.ids import Holder, LeaseId
from relax_actor.row_queue.account import Account
from relax_actor.row_queue.checks import check_columns, check_shared
from relax_actor.row_queue.records import (
    Columns,
    Dealt,
    Event,
    Fenced,
    FieldsPut,
    LeaseOver,
    Ranges,
    RowsAcked,
    RowsDropped,
    RowsLeased,
    RowsPut,
    SharedPut,
    StreamEnded,
    TurnDealt,
    count,
    each,
    ranges,
)
from relax_actor.row_queue.sampling import GroupsReady
from relax_actor.row_queue.snapshot import snapshot
from relax_actor.row_queue.spec import QueueSpec
from relax_actor.row_queue.state import GroupState, TableState
from relax_actor.row_queue.turns import TokensReady
from relax_actor.transfer_queue.records import Put

POISON = "poison: whoever gets it does not acknowledge it"
SHORT = "its group is not whole, and no further rows come"


class Table(Account):
    """Rows, fields, consumer groups, leases.

    Args:
        spec: checked.
    """

    def __init__(self, spec: QueueSpec) -> None:
        super().__init__(TableState(spec))
        self.spec = spec
        self.refused: Counter[Put] = Counter()
        self._events: list[Event] = []
        self._dropped: list[RowsDropped] = []

    @classmethod
    def replay(cls, spec: QueueSpec, events: Iterable[Event]) -> Self:
        """Return the table that these events made; what it freed back then is not told again."""
        table = cls(spec)
        for event in events:
            table._state.apply(event)
        table.take_freed()
        return table

    # -- producers ------------------------------------------------------------------------------

    def put(  # noqa: PLR0917 - as the endpoint has them
        self,
        producer: Holder,
        seq: int,
        columns: Columns,
        keys: Sequence[int] = (),
        group_rows: int = 0,
        shared: SharedPut | None = None,
    ) -> tuple[Put, int]:
        """Take new rows.

        Args:
            producer: who puts them.
            seq: counts this incarnation's puts, from 1: the same number is the same put.
            columns: fields of all rows.
            keys: the group of each row, where rows have groups.
            group_rows: how many rows each of these groups has.
            shared: what the rows of groups have in common; of a group that has it already, the first stays.

        Returns:
            What became of them, and the number of the first.

        Raises:
            ValueError: an unknown field, columns of different lengths, keys that do not fit, shared fields of
                a group that has rows without them, or new rows after the end of the stream.
        """
        known = self.known(producer, seq)
        if known is not None:
            return known
        rows = check_columns(self.spec, columns)
        if keys and (len(keys) != rows or group_rows < 1):
            raise ValueError(f"{rows} rows, {len(keys)} keys, {group_rows} rows a group")
        if self._state.is_ended:
            raise ValueError("the stream has ended: no rows are put after that")
        self._share(shared, keys)
        first = self._state.next_row
        self._emit(RowsPut(producer, seq, first, rows, columns, tuple(keys), group_rows))
        return Put.ACCEPTED, first

    def append(self, producer: Holder, seq: int, rows: Ranges, columns: Columns) -> Put:
        """Take further fields of rows.

        Rows that have them already are passed over: whoever did the work before died before it could say so.

        Raises:
            ValueError: an unknown field, a length that does not fit, or a row that has only some of them.
        """
        known = self.known(producer, seq)
        if known is not None:
            return known[0]
        if check_columns(self.spec, columns) != count(rows):
            raise ValueError(f"{count(rows)} rows, and columns of another length")
        if not self._state.rows.all_live(rows):
            return self._refuse(Put.STALE)  # dropped meanwhile, or done with by everybody
        lacking = self._state.rows.lacking(rows, self.spec.mask(tuple(columns)))
        at = 0
        for low, high in rows:
            for start, end in ranges(row for row in range(low, high) if row in lacking):
                parts = {
                    name: column.part(at + start - low, at + end - low) for name, column in columns.items()
                }
                self._emit(FieldsPut(producer, seq, [(start, end)], parts))
            at += high - low
        return Put.ACCEPTED if lacking else self._refuse(Put.DUPLICATE)

    def end_stream(self) -> None:
        """Say that no further rows come: what is left is dealt, and what is no whole group is dropped."""
        if self._state.is_ended:
            return
        self._emit(StreamEnded())
        for name, state in self._state.groups.items():
            if isinstance(state.ready, GroupsReady):
                rows = self._state.rows.short(name, state.ready.wanted)
                if rows:
                    self._emit(RowsDropped(rows, SHORT, name))

    def known(self, producer: Holder, seq: int) -> tuple[Put, int] | None:
        """Say what became of a put that is repeated, or comes from the dead; None of a new one."""
        self._meet(producer)
        if self._state.is_fenced(producer):
            return self._refuse(Put.STALE), 0
        first = self._state.first_of(producer, seq)
        if first is None:
            return None
        return (self._refuse(Put.STALE), 0) if first < 0 else (self._refuse(Put.DUPLICATE), first)

    # -- consumers ------------------------------------------------------------------------------

    def lease(self, group: str, holder: Holder, max_rows: int, now: float, *, rank: int = 0) -> Dealt | None:
        """Lend ready rows; None where there are none for this consumer.

        Raises:
            ValueError: no such group, or no such rank.
        """
        state = self._group(group, rank)
        self._meet(holder)
        if self._state.is_fenced(holder):
            return None
        rows = self._next(state, max_rows, rank)
        if rows is None:
            return None
        lease_id, until_s = self._state.next_lease, now + state.spec.lease_s
        self._emit(RowsLeased(lease_id, group, holder, rows, until_s, rank))
        parts = tuple(self._state.rows.parts(rows, state.spec.needs))
        common = self._state.rows.common(parts, state.spec.needs)
        return Dealt(lease_id=lease_id, parts=parts, until_s=until_s, shared=common)

    def ack(self, lease_ids: Sequence[LeaseId], holder: Holder) -> list[Put]:
        """Settle leased rows; a lease that has ended, or is another's, is refused."""
        leases = self._state.leases
        own = [lease_id for lease_id in lease_ids if lease_id in leases and leases[lease_id].holder == holder]
        if own:
            self._emit(RowsAcked(own))
        return [Put.ACCEPTED if lease_id in own else self._refuse(Put.STALE) for lease_id in lease_ids]

    def drop(self, rows: Ranges, reason: str) -> None:
        """Give rows up for all groups; one on loan is not dealt again, whatever becomes of the loan."""
        live = ranges(row for row in each(rows) if self._state.rows.is_live(row))
        if live:
            self._emit(RowsDropped(live, reason))

    # -- deaths and deadlines -------------------------------------------------------------------

    def retain(self, holder: Holder, lease_ids: Sequence[LeaseId], group: str) -> None:
        """Take back what a living consumer does not know that it has: the answer got lost."""
        lost = [
            lease_id
            for lease_id, lease in self._state.leases.items()
            if lease.holder == holder and lease.group == group and lease_id not in lease_ids
        ]
        if lost:
            self._emit(LeaseOver(lost, is_failure=False))

    def holder_gone(self, name: str, incarnation: int) -> None:
        """Take back what this incarnation and older ones hold, and take nothing from them any more."""
        if incarnation < self._state.fenced.get(name, 0):
            return
        self._emit(Fenced(name, incarnation + 1))
        held = [
            lease_id
            for lease_id, lease in self._state.leases.items()
            if lease.holder.name == name and lease.holder.incarnation <= incarnation
        ]
        self._over(held)

    def expire(self, now: float) -> list[LeaseId]:
        """End the leases whose time is over; return them."""
        due: list[LeaseId] = []
        deadlines = self._state.deadlines
        while deadlines and deadlines[0][0] <= now:
            lease_id = heapq.heappop(deadlines)[1]
            if lease_id in self._state.leases:
                due.append(lease_id)
        self._over(due)
        return due

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do, on the queue's clock."""
        deadlines = self._state.deadlines
        while deadlines and deadlines[0][1] not in self._state.leases:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    # -- what follows ---------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Return what was decided since the last call; to be written down before anybody is told."""
        events, self._events = self._events, []
        return events

    def take_freed(self) -> list[str]:
        """Return the segments that nobody needs any more."""
        return self._state.rows.take_freed()

    def take_dropped(self) -> list[RowsDropped]:
        """Return what was dropped, and why."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def snapshot(self) -> list[Event]:
        """Return events that make this table anew, without its past."""
        return snapshot(self._state)

    # -- inside ---------------------------------------------------------------------------------

    def _meet(self, holder: Holder) -> None:
        """Take back what earlier incarnations hold: their end may have been told to a queue that died."""
        if holder.incarnation > max(1, self._state.fenced.get(holder.name, 0)):
            self.holder_gone(holder.name, holder.incarnation - 1)

    def _share(self, shared: SharedPut | None, keys: Sequence[int]) -> None:
        if shared is None:
            return
        check_shared(self.spec, shared, keys)
        new = self._state.rows.shared.lacking(shared.keys)
        if len(new) == len(shared.keys):
            self._emit(shared)
            return
        for key in new:
            at = shared.keys.index(key)
            part = {name: column.part(at, at + 1) for name, column in shared.columns.items()}
            self._emit(SharedPut((key,), part))

    def _next(self, state: GroupState, max_rows: int, rank: int) -> Ranges | None:
        ready = state.ready
        if not isinstance(ready, TokensReady):
            return ready.offer(max_rows) or None
        if ready.share(rank) is None:
            turn = ready.turn(is_end=self._state.is_ended)
            if turn is not None:
                self._emit(TurnDealt(state.spec.name, [*turn]))
        return ready.share(rank)

    def _over(self, lease_ids: Sequence[LeaseId]) -> None:
        """End leases without an acknowledgement; rows that ended so too often are dropped."""
        if not lease_ids:
            return
        groups = {self._state.leases[lease_id].group for lease_id in lease_ids}
        self._emit(LeaseOver([*lease_ids], is_failure=True))
        for name in sorted(groups):
            state = self._state.groups[name]
            poison = sorted(row for row, n in state.failures.items() if n >= state.spec.max_attempts)
            if poison:
                self._emit(RowsDropped(ranges(poison), POISON, name))

    def _refuse(self, what: Put) -> Put:
        self.refused[what] += 1
        return what

    def _emit(self, event: Event) -> None:
        self._state.apply(event)
        self._events.append(event)
        if isinstance(event, RowsDropped):
            self._dropped.append(event)
