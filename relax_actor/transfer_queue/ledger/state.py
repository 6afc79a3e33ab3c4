"""What the ledger knows: groups, leases and positions, the indexes into them, and the counters.

Every change of a row goes through `move`, so that counters, leases and the reward line follow it. Groups that
were trained or dropped are forgotten but for their position.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_actor.ids import GroupId, LeaseId, PolicyVersion, SampleIndex
from relax_actor.protocol import BatchSampling, PromptGroup, SampleChunk, SampleReady, TensorRef
from relax_actor.transfer_queue.ledger.drops import Drops
from relax_actor.transfer_queue.ledger.groups import Group, Row, RowState, no_rows
from relax_actor.transfer_queue.ledger.index import Index
from relax_actor.transfer_queue.ledger.leases import LeaseTable
from relax_actor.transfer_queue.ledger.ordered import OrderedSet
from relax_actor.transfer_queue.ledger.positions import Positions
from relax_actor.transfer_queue.records import DroppedGroup, DroppedSample, RowKey
from relax_actor.transfer_queue.rules import LedgerConfig


@dataclass(slots=True)
class Totals:
    """Sums over the train groups that are not outstanding any more, and of all that came in."""

    submitted: int = 0  # samples
    trained: int = 0  # samples
    trained_groups: int = 0
    unscored: int = 0  # samples dropped from trained groups
    dropped: int = 0  # samples of dropped groups
    regenerated: int = 0  # samples a rewind threw away, to be sampled again
    drops_in_a_row: int = 0  # groups, since the last batch was trained
    filtered: int = 0  # groups dropped for equal rewards, not yet reported with a batch that was trained
    missed: int = 0  # groups by which batches were short


@dataclass(slots=True)
class LedgerState:
    """Everything the ledger knows; two states that know the same are equal."""

    config: LedgerConfig
    version: PolicyVersion | None = None
    groups: dict[GroupId, Group] = field(default_factory=dict)
    train_groups: int = 0  # of `groups`
    rows: list[int] = field(default_factory=no_rows)  # of the train groups of `groups`, by state
    totals: Totals = field(default_factory=Totals)
    positions: Positions = field(default_factory=Positions)
    drops: Drops = field(default_factory=Drops)
    last_dropped: DroppedGroup | None = None
    stream_ended: bool = False
    leases: LeaseTable = field(default_factory=LeaseTable)
    last_acked: LeaseId | None = None
    dealt: BatchSampling = field(default_factory=BatchSampling)  # of the batch on loan
    fences: dict[str, int] = field(default_factory=dict)  # by actor name: the lowest incarnation listened to
    index: Index = field(default_factory=Index)
    unscored: OrderedSet[RowKey] = field(default_factory=OrderedSet)
    finished_evals: dict[GroupId, str] = field(default_factory=dict)  # and why one was given up
    references: Counter[str] = field(default_factory=Counter)  # live arrays in each segment
    freed: list[str] = field(default_factory=list, compare=False)
    drop_log: list[DroppedGroup | DroppedSample] = field(default_factory=list, compare=False)
    _deadlines: list[tuple[float, GroupId]] = field(default_factory=list, compare=False)

    def row(self, key: RowKey) -> Row | None:
        """Return an outstanding row."""
        group = self.groups.get(key[0])
        return group.rows[key[1]] if group is not None and 0 <= key[1] < len(group.rows) else None

    def add(self, prompt: PromptGroup) -> None:
        """Take in a prompt of which nothing is sampled."""
        group = self.groups[prompt.group_id] = Group.of(prompt)
        self.refer(group.prompt_refs)
        if group.is_train:
            self.positions.take(group.group_id)
            self.train_groups += 1
            self.totals.submitted += len(group.rows)
            self.rows[RowState.WAITING] += len(group.rows)
        self.index.file(group)

    def move(self, group: Group, index: SampleIndex, to: RowState, lease_id: LeaseId | None = None) -> None:
        """Change the state of a row and with it everything that counts or lists it."""
        row = group.rows[index]
        was, key = row.state, (group.group_id, index)
        if row.lease_id is not None and row.lease_id in self.leases.leases:
            self.leases.release(row.lease_id, key)
        for counts in (group.counts, self.rows) if group.is_train else (group.counts,):
            counts[was] -= 1
            counts[to] += 1
        row.state, row.lease_id = to, lease_id
        if was is RowState.SAMPLED:
            self.unscored.discard(key)
        if to is RowState.SAMPLED:
            self.unscored.add(key)

    def drop_row(self, group: Group, index: SampleIndex) -> None:
        """Give up a row and free its arrays."""
        row = group.rows[index]
        self.release(row.refs)
        row.version = row.reward = row.chunk = None
        self.move(group, index, RowState.DROPPED)

    def return_row(self, group: Group, index: SampleIndex) -> None:
        """Let any rollout have a row whose lease has ended; it goes on after the chunk, if there is one."""
        chunk = group.rows[index].chunk
        self.move(group, index, RowState.WAITING)
        group.rows[index] = Row(chunk=chunk, version=chunk.oldest_version if chunk else None)

    def keep_chunk(self, group: Group, chunk: SampleChunk) -> None:
        """Keep a chunk instead of the one before."""
        row = group.rows[chunk.sample_index]
        superseded = row.refs
        row.chunk, row.version = chunk, chunk.oldest_version
        self.refer(row.refs)
        self.release(superseded)

    def keep_sample(self, group: Group, sample: SampleReady) -> None:
        """Keep a finished sample instead of its chunk."""
        row = group.rows[sample.sample_index]
        superseded = row.refs
        row.chunk, row.sample, row.version = None, sample, sample.oldest_version
        self.refer(row.refs)
        self.release(superseded)
        self.move(group, sample.sample_index, RowState.SAMPLED)

    def reset_row(self, group: Group, index: SampleIndex) -> None:
        """Make a row as if it had never been leased."""
        self.release(group.rows[index].refs)
        self.move(group, index, RowState.WAITING)
        group.rows[index] = Row()

    def forget(self, group: Group) -> None:
        """Take a group out of every table and free all its arrays."""
        for index, row in enumerate(group.rows):
            self.release(row.refs)
            if row.lease_id is not None and row.lease_id in self.leases.leases:
                self.leases.release(row.lease_id, (group.group_id, SampleIndex(index)))
            if row.state is RowState.SAMPLED:
                self.unscored.discard((group.group_id, SampleIndex(index)))
        self.release(group.prompt_refs)
        if group.is_train:
            self.rows = [total - gone for total, gone in zip(self.rows, group.counts, strict=True)]
            self.train_groups -= 1
        self.index.remove(group.group_id)
        del self.groups[group.group_id]

    def refer(self, refs: Iterable[TensorRef]) -> None:
        """Keep the segments of these arrays."""
        for ref in refs:
            self.references[ref.segment] += 1

    def release(self, refs: Iterable[TensorRef]) -> None:
        """Let these arrays go; a segment without any is freed."""
        for ref in refs:
            self.references[ref.segment] -= 1
            if not self.references[ref.segment]:
                del self.references[ref.segment]
                self.freed.append(ref.segment)

    def start_clock(self, group: Group, since_s: float, until_s: float) -> None:
        """Start the clock of a group, if it does not run."""
        if group.until_s is None:
            group.since_s = since_s
            self.set_deadline(group, until_s)

    def set_deadline(self, group: Group, until_s: float) -> None:
        """Give a group a deadline."""
        group.until_s = until_s
        heapq.heappush(self._deadlines, (until_s, group.group_id))

    def next_group_deadline(self) -> float | None:
        """Return when the next group is overdue, in seconds of the queue's clock."""
        while self._deadlines and not self._is_deadline(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def overdue_groups(self, now: float) -> list[Group]:
        """Return the incomplete groups whose deadline has passed."""
        found: dict[GroupId, Group] = {}
        while (at := self.next_group_deadline()) is not None and at <= now:
            group_id = heapq.heappop(self._deadlines)[1]
            found[group_id] = self.groups[group_id]
        return list(found.values())

    def _is_deadline(self, at: float, group_id: GroupId) -> bool:
        group = self.groups.get(group_id)
        return group is not None and group.until_s == at and not group.complete
