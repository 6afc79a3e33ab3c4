"""The decisions that several methods of the ledger share: fences, ended leases, drops."""

from collections import Counter
from collections.abc import Iterable

from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion, SampleIndex
from relax_actor.protocol import SampleChunk, SampleReady
from relax_actor.rl.filtering import has_zero_variance
from relax_actor.transfer_queue.events import (
    Event,
    Fenced,
    GroupDropped,
    LeaseEnded,
    PartialsEnded,
    SampleDropped,
)
from relax_actor.transfer_queue.ledger import waiting
from relax_actor.transfer_queue.ledger.fold import apply
from relax_actor.transfer_queue.ledger.groups import Group, RowState, has_fitting_routes
from relax_actor.transfer_queue.ledger.leases import Lease
from relax_actor.transfer_queue.ledger.state import LedgerState
from relax_actor.transfer_queue.records import DroppedGroup, DropReason, LeaseKind, Put, Refusal, RowKey
from relax_actor.transfer_queue.rules import LedgerConfig, PartialPolicy


class Decider:
    """A ledger's state, the events decided on and not yet taken, and what was refused."""

    def __init__(self, config: LedgerConfig) -> None:
        self.config = config
        self.refused: Counter[Refusal] = Counter()
        self._state = LedgerState(config)
        self._events: list[Event] = []
        self._now_s = 0.0

    def take_events(self) -> list[Event]:
        """Return the events since the last call: for the journal, before anyone is answered."""
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        apply(self._state, event)
        self._events.append(event)

    def _tick(self, now: float) -> None:
        self._now_s = max(self._now_s, now)

    def _admits(self, holder: Holder, now: float) -> bool:
        """Whether this incarnation is listened to; a newer one than known puts an end to the older."""
        self._tick(now)
        lowest = self._state.fences.get(holder.name, 0)
        if holder.incarnation < lowest:
            self.refused[Refusal.OLD_INCARNATION] += 1
            return False
        self._fence(holder.name, holder.incarnation)
        return True

    def _fence(self, name: str, incarnation: int) -> None:
        if incarnation <= self._state.fences.get(name, 0):
            return
        self._emit(Fenced(name=name, incarnation=incarnation))
        self._end(lease for lease in self._state.leases.of(name) if lease.holder.incarnation < incarnation)

    def _holds(self, holder: Holder, lease_id: LeaseId, kind: LeaseKind, row: RowKey) -> bool:
        lease = self._state.leases.leases.get(lease_id)
        return lease is not None and (lease.kind, lease.holder) == (kind, holder) and row in lease.rows

    def _refuse(self, holder: Holder, *, duplicate: bool) -> Put:
        if duplicate:
            self.refused[Refusal.DUPLICATE] += 1
            return Put.DUPLICATE
        fenced = holder.incarnation < self._state.fences.get(holder.name, 0)
        self.refused[Refusal.OLD_INCARNATION if fenced else Refusal.STALE_LEASE] += 1
        return Put.STALE

    def _fits(self, row: SampleReady | SampleChunk) -> bool:
        """Whether a row's arrays fit one another; if not, its lease is to end as one that failed."""
        fits = has_fitting_routes(self._state.groups[row.group_id].prompt, row)
        if not fits:
            self.refused[Refusal.ROUTED_EXPERTS] += 1
        return fits

    def _is_newest(self, version: PolicyVersion) -> bool:
        if version == self._state.version:
            return True
        self.refused[Refusal.VERSION] += 1
        return False

    def _goes_back(self, version: PolicyVersion) -> bool:
        if self._state.version is None or version >= self._state.version:
            return False
        self.refused[Refusal.VERSION] += 1
        return True

    def _end(self, leases: Iterable[Lease], *, failed: bool = True) -> None:
        """Take leases back; a group of which one holder had several loses one attempt, not several."""
        counted: set[GroupId] = set()
        for lease in leases:
            if lease.lease_id not in self._state.leases.leases:
                continue  # a drop after an earlier one ended it too
            rows = sorted(lease.rows)
            counts = failed and not (lease.kind is LeaseKind.PROMPT and rows[0][0] in counted)
            counted |= {group_id for group_id, _ in rows}
            self._emit(LeaseEnded(lease_id=lease.lease_id, failed=counts))
            self._give_up_hopeless(lease.kind, rows)

    def _give_up_hopeless(self, kind: LeaseKind, rows: list[RowKey]) -> None:
        if kind is LeaseKind.PROMPT:
            self._drop_if_poison(self._state.groups[rows[0][0]])
        elif kind is LeaseKind.REWARD:
            for group_id, index in rows:
                self._drop_if_unscorable(group_id, index)
        else:
            self._drop_stale()

    def _drop_if_poison(self, group: Group) -> None:
        if group.attempts > self.config.max_attempts:
            self._drop(group, DropReason.POISON, f"{group.attempts} replicas died or timed out on it")

    def _drop_if_unscorable(self, group_id: GroupId, index: SampleIndex) -> None:
        row = self._state.row((group_id, index))
        if row is not None and row.attempts > self.config.max_attempts:
            detail = f"{row.attempts} reward actors died or timed out on it"
            self._drop_sample(group_id, index, detail)

    def _drop_sample(self, group_id: GroupId, index: SampleIndex, detail: str) -> None:
        self._emit(SampleDropped(group_id=group_id, sample_index=index, detail=detail))
        self._drop_if_useless(self._state.groups[group_id])

    def _drop_if_useless(self, group: Group) -> None:
        """Drop a train group that is complete, if it has too few rewards, or equal ones that are filtered."""
        if not (group.is_train and group.complete):
            return
        needed = min(self.config.min_valid_samples, len(group.rows))
        valid = group.count(RowState.SCORED)
        if valid < needed:
            details = "; ".join(sorted({row.detail for row in group.rows if row.detail}))
            detail = f"{valid} of {len(group.rows)} samples have a reward, {needed} are needed: {details}"
            self._drop(group, DropReason.FEW_VALID, detail)
        elif self.config.filters_zero_variance and has_zero_variance(group.rewards):
            self._drop(group, DropReason.ZERO_VARIANCE, f"{valid} samples of reward {group.rewards[0]:g}")

    def _end_overdue(self, group: Group, now: float) -> None:
        """Drop a group whose time is over; or end its samples, and leave it the time to be scored."""
        config = self.config
        is_over = now >= group.since_s + config.group_deadline_s
        is_sampled = not group.count(RowState.WAITING) + group.count(RowState.RUNNING)
        if is_over or (config.on_partial_timeout is PartialPolicy.DROP and not is_sampled):
            limit_s = config.group_deadline_s if is_over else config.partial_timeout_s
            late = waiting.describe(self._state, group, now)
            self._drop(group, DropReason.DEADLINE, f"after {limit_s:g} s, {late}")
        else:
            self._end_partials(group)

    def _end_partials(self, group: Group) -> None:
        """End what is unfinished: it has the tokens of its chunk, or is no sample."""
        unsampled = sorted(group.indices(RowState.WAITING) + group.indices(RowState.RUNNING))
        started = tuple(index for index in unsampled if group.rows[index].chunk is not None)
        until_s = group.since_s + self.config.group_deadline_s
        self._emit(PartialsEnded(group_id=group.group_id, rows=started, group_until_s=until_s))
        for index in unsampled:
            if index not in started:
                detail = f"no chunk after {self.config.partial_timeout_s:g} s"
                self._emit(SampleDropped(group_id=group.group_id, sample_index=index, detail=detail))
        self._drop_if_useless(group)

    def _drop_stale(self) -> None:
        """Give up the groups, not in the trainer's hands, that are too old for it now and will be later."""
        version = self._state.version or 0  # before the first one nothing has started
        for group_id in self._state.index.too_old(version - self.config.max_staleness):
            group = self._state.groups[group_id]
            detail = f"sampled by version {group.oldest_version}, the trainer is at {version}"
            self._drop(group, DropReason.STALE, detail)

    def _drop_surplus(self) -> None:
        """Give up what steps that were skipped have left over at the end of the run."""
        state = self._state
        if state.totals.trained_groups + state.totals.missed >= self.config.total_groups:
            for group in [each for each in state.groups.values() if each.is_train]:
                self._drop(group, DropReason.SURPLUS, "the run is over")

    def _drop(self, group: Group, reason: DropReason, detail: str) -> None:
        dropped = DroppedGroup(
            group_id=group.group_id,
            samples=len(group.rows),
            reason=reason,
            detail=detail,
            origin=group.prompt.origin,
        )
        self._emit(GroupDropped(group=dropped))
