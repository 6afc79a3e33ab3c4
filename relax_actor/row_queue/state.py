"""What a row queue knows, and how each event changes it. Nothing is decided here. Pure."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relax_actor.ids import Holder, LeaseId
from relax_actor.row_queue.extent import Extent
from relax_actor.row_queue.records import (
    Event,
    Fenced,
    FieldsPut,
    LeaseOver,
    PutBy,
    Ranges,
    RowsAcked,
    RowsDropped,
    RowsGone,
    RowsLeased,
    RowsPut,
    SeqSeen,
    Settled,
    SharedPut,
    StreamEnded,
    TurnDealt,
    each,
    ranges,
)
from relax_actor.row_queue.rows import Rows
from relax_actor.row_queue.sampling import FifoReady, GroupsReady, make_ready
from relax_actor.row_queue.spec import ConsumerGroup, QueueSpec, TokenBudget
from relax_actor.row_queue.turns import TokensReady

REMEMBERED_PUTS = 256
"""Of each producer: a put sent again after so many others is refused instead of recognised."""


@dataclass(slots=True)
class Lease:
    """Rows on loan."""

    group: str
    holder: Holder
    rows: Ranges
    until_s: float
    rank: int


@dataclass(slots=True)
class GroupState:
    """How far a consumer group is."""

    spec: ConsumerGroup
    mask: int
    ready: FifoReady | GroupsReady | TokensReady
    failures: Counter[int] = field(default_factory=Counter)  # of rows that were lent in vain
    acked: int = 0
    dropped: int = 0


class TableState:
    """What `table.Table` decides by.

    Args:
        spec: the queue's, checked.
    """

    def __init__(self, spec: QueueSpec) -> None:
        self.spec, self.rows = spec, Rows(spec)
        self.next_row = 0
        self.is_ended = False
        self.groups = {group.name: self._group(group) for group in spec.groups}
        self.leases: dict[LeaseId, Lease] = {}
        self.next_lease = LeaseId(1)
        self.deadlines: list[tuple[float, LeaseId]] = []
        self.fenced: dict[str, int] = {}
        self.seen: dict[Holder, dict[int, int]] = defaultdict(dict)  # first row by seq
        self.put_by: Counter[str] = Counter()  # rows by the producer's name
        self._appliers: dict[type, Callable[[Any], None]] = {
            RowsPut: self._put,
            SharedPut: self._shared,
            FieldsPut: self._fields,
            StreamEnded: self._stream_ended,
            TurnDealt: self._turn,
            RowsLeased: self._leased,
            RowsAcked: self._acked,
            LeaseOver: self._over,
            RowsDropped: self._dropped,
            Fenced: self._fence,
            RowsGone: self._gone,
            Settled: self._settled,
            SeqSeen: self._seq,
            PutBy: self._by,
        }

    def apply(self, event: Event) -> None:
        """Make this what it is after an event, which must be possible."""
        self._appliers[type(event)](event)

    # -- rows and fields ------------------------------------------------------------------------

    def _put(self, event: RowsPut) -> None:
        extent = self.rows.add(event)
        self.next_row = max(self.next_row, extent.end)
        self.put_by[event.producer.name] += event.count
        self._remember(event.producer, event.seq, event.first)
        self._look(extent, extent.first, extent.end, 0)

    def _shared(self, event: SharedPut) -> None:
        self.rows.share(event)

    def _fields(self, event: FieldsPut) -> None:
        self._remember(event.producer, event.seq, 0)
        bits, at = self.spec.mask(tuple(event.columns)), 0
        for extent, low, high in self.rows.of(event.rows):
            columns = {name: column.part(at, at + high - low) for name, column in event.columns.items()}
            self.rows.extend(extent, low, high, columns)
            self._look(extent, low, high, bits)
            at += high - low

    def _stream_ended(self, _: StreamEnded) -> None:
        self.is_ended = True
        self.rows.end()

    # -- leases ---------------------------------------------------------------------------------

    def _turn(self, event: TurnDealt) -> None:
        ready = self.groups[event.group].ready
        assert isinstance(ready, TokensReady)  # noqa: S101 - nobody else deals turns
        ready.deal(event.shares)

    def _leased(self, event: RowsLeased) -> None:
        lease = Lease(event.group, event.holder, event.rows, event.until_s, event.rank)
        self.leases[event.lease_id] = lease
        self.next_lease = max(self.next_lease, LeaseId(event.lease_id + 1))
        heapq.heappush(self.deadlines, (event.until_s, event.lease_id))
        ready = self.groups[event.group].ready
        if isinstance(ready, TokensReady):
            ready.lend(event.rank, event.rows)
        else:
            ready.take(event.rows)

    def _acked(self, event: RowsAcked) -> None:
        for lease_id in event.lease_ids:
            lease = self.leases.pop(lease_id)
            state = self.groups[lease.group]
            for row in each(lease.rows) if state.failures else ():
                state.failures.pop(row, None)
            if isinstance(state.ready, GroupsReady) and state.ready.wanted:
                state.ready.finish(self.rows.keys_of(lease.rows))
            state.acked += self._settle(lease.rows, lease.group)

    def _over(self, event: LeaseOver) -> None:
        for lease_id in sorted(event.lease_ids, reverse=True):  # what was lent first is in front again
            lease = self.leases.pop(lease_id)
            state = self.groups[lease.group]
            rows = ranges(row for row in each(lease.rows) if not self.rows.is_settled(row, lease.group))
            if event.is_failure:
                state.failures.update(each(rows))
            if isinstance(state.ready, TokensReady):
                state.ready.give_back(lease.rank, rows)
            elif rows:
                state.ready.give(rows, again=True)

    def _dropped(self, event: RowsDropped) -> None:
        for name in [event.group] if event.group else list(self.groups):
            state = self.groups[name]
            gone = ranges(row for row in each(event.rows) if not self.rows.is_settled(row, name))
            state.ready.take(gone)
            if isinstance(state.ready, GroupsReady):
                state.ready.lessen(gone)
            state.dropped += self._settle(gone, name)
            for row in each(gone):
                state.failures.pop(row, None)

    def _fence(self, event: Fenced) -> None:
        self.fenced[event.name] = max(event.incarnation, self.fenced.get(event.name, 0))
        for holder in [holder for holder in self.seen if self.is_fenced(holder)]:
            del self.seen[holder]

    # -- snapshots ------------------------------------------------------------------------------

    def _gone(self, event: RowsGone) -> None:
        self.next_row = event.below

    def _settled(self, event: Settled) -> None:
        state = self.groups[event.group]
        state.ready.take(event.rows)
        if isinstance(state.ready, GroupsReady):
            state.ready.restore(event.wanted)
        self._settle(event.rows, event.group)
        state.acked, state.dropped = event.acked, event.dropped
        state.failures = Counter(event.failures)

    def _seq(self, event: SeqSeen) -> None:
        self._remember(event.producer, event.seq, event.first)

    def _by(self, event: PutBy) -> None:
        self.put_by[event.name] = event.rows

    def is_fenced(self, holder: Holder) -> bool:
        """Whether somebody is dead."""
        return holder.incarnation < self.fenced.get(holder.name, 0)

    def first_of(self, holder: Holder, seq: int) -> int | None:
        """Return the first row of a put that is known; 0 of one that made none, -1 of one long ago."""
        seen = self.seen.get(holder, {})
        if seq in seen:
            return seen[seq]
        return -1 if len(seen) == REMEMBERED_PUTS and seq < min(seen) else None

    # -- inside ---------------------------------------------------------------------------------

    def _group(self, spec: ConsumerGroup) -> GroupState:
        name = spec.sampler.length_of if isinstance(spec.sampler, TokenBudget) else ""
        ready = make_ready(spec, lambda row: self.rows.length(row, name), self.rows.group_of)
        return GroupState(spec, self.spec.mask(spec.needs), ready)

    def _look(self, extent: Extent, low: int, high: int, added: int) -> None:
        """Give rows to the groups that have been waiting for the fields they got last."""
        masks = extent.masks[low - extent.first : high - extent.first]
        for name, state in self.groups.items():
            mask = state.mask
            if added and not mask & added:
                continue
            settled = extent.settled[name]
            if not settled and all(have & mask == mask for have in masks):
                state.ready.give([(low, high)])
                continue
            rows = [
                low + index
                for index, have in enumerate(masks)
                if have & mask == mask and low + index not in settled
            ]
            if rows:
                state.ready.give(ranges(rows))

    def _settle(self, rows: Ranges, group: str) -> int:
        return sum(self.rows.settle(extent, low, high, group) for extent, low, high in [*self.rows.of(rows)])

    def _remember(self, producer: Holder, seq: int, first: int) -> None:
        if not seq:
            return  # made by a snapshot
        seen = self.seen[producer]
        seen[seq] = first
        if len(seen) > REMEMBERED_PUTS:
            del seen[min(seen)]
