"""Loans that end by themselves: who holds what, until when."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion
from relax_actor.transfer_queue.records import LeaseKind, RowKey

_FIRST_ID = LeaseId(1)


@dataclass(slots=True, kw_only=True)
class Lease:
    """Rows on loan to one holder; over when the last of them is put."""

    lease_id: LeaseId
    kind: LeaseKind
    holder: Holder
    rows: set[RowKey]
    since_s: float
    until_s: float
    version: PolicyVersion | None = None  # of prompts and batches
    dealt: list[GroupId] = field(default_factory=list)  # a batch's groups, as they were lent
    is_whole: bool = True  # the batch gets no further groups

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        """The groups these rows are of, in order."""
        return tuple(sorted({group_id for group_id, _ in self.rows} | {*self.dealt}))


@dataclass(slots=True)
class LeaseTable:
    """All live leases, by id, by holder's name and by deadline."""

    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    next_id: LeaseId = _FIRST_ID
    batch: Lease | None = None  # there is one trainer, so one batch at a time
    _by_name: dict[str, set[LeaseId]] = field(default_factory=dict)
    _running: dict[str, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, LeaseId]] = field(default_factory=list, compare=False)

    def add(self, lease: Lease) -> None:
        """Start a lease; its id is never used again."""
        self.leases[lease.lease_id] = lease
        self.next_id = LeaseId(max(self.next_id, lease.lease_id + 1))
        self._by_name.setdefault(lease.holder.name, set()).add(lease.lease_id)
        heapq.heappush(self._deadlines, (lease.until_s, lease.lease_id))
        if lease.kind is LeaseKind.BATCH:
            self.batch = lease
        if lease.kind is LeaseKind.PROMPT:
            self._running[lease.holder.name] = self.running(lease.holder.name) + len(lease.rows)

    def extend(
        self, lease_id: LeaseId, group_ids: Iterable[GroupId], until_s: float, *, is_whole: bool
    ) -> None:
        """Lend further groups of a batch, until later."""
        lease = self.leases[lease_id]
        lease.dealt += group_ids
        lease.until_s, lease.is_whole = until_s, is_whole
        heapq.heappush(self._deadlines, (until_s, lease_id))

    def remove(self, lease_id: LeaseId) -> Lease:
        """End a lease and return what it was."""
        lease = self.leases.pop(lease_id)
        held = self._by_name[lease.holder.name]
        held.discard(lease_id)
        if lease.kind is LeaseKind.PROMPT:
            self._running[lease.holder.name] -= len(lease.rows)
        if not held:
            del self._by_name[lease.holder.name]
            self._running.pop(lease.holder.name, None)
        if lease.kind is LeaseKind.BATCH:
            self.batch = None
        return lease

    def release(self, lease_id: LeaseId, row: RowKey) -> None:
        """Take one row off a lease, which ends with its last row."""
        lease = self.leases[lease_id]
        lease.rows.discard(row)
        if lease.kind is LeaseKind.PROMPT:
            self._running[lease.holder.name] -= 1
        if not lease.rows:
            self.remove(lease_id)

    def running(self, name: str) -> int:
        """Return how many samples a rollout has on loan."""
        return self._running.get(name, 0)

    def of(self, name: str) -> list[Lease]:
        """Return the leases of every incarnation of `name`, oldest first."""
        return self._sorted(self._by_name.get(name, ()))

    def due(self, now: float) -> list[Lease]:
        """Return the leases that have run out, in the order of their deadlines."""
        found: dict[LeaseId, Lease] = {}
        while (at := self.next_deadline()) is not None and at <= now:
            lease_id = heapq.heappop(self._deadlines)[1]
            found[lease_id] = self.leases[lease_id]
        return list(found.values())

    def next_deadline(self) -> float | None:
        """Return when the next lease runs out, in seconds of the queue's clock."""
        while self._deadlines and not self._is_deadline(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_deadline(self, at: float, lease_id: LeaseId) -> bool:
        lease = self.leases.get(lease_id)
        return lease is not None and lease.until_s == at

    def _sorted(self, lease_ids: Iterable[LeaseId]) -> list[Lease]:
        return [self.leases[lease_id] for lease_id in sorted(lease_ids)]
