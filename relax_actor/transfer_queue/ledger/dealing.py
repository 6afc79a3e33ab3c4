"""What the trainer gets: whole groups, a short batch, or the word that there is nothing to train on."""

from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion
from relax_actor.protocol import BatchLease, BatchSampling, BatchTrained
from relax_actor.transfer_queue.events import BatchAcked, BatchExtended, BatchLeased
from relax_actor.transfer_queue.ledger.groups import train_samples
from relax_actor.transfer_queue.ledger.leases import Lease
from relax_actor.transfer_queue.ledger.reporter import Reporter
from relax_actor.transfer_queue.ledger.selection import choose_batch, choose_part
from relax_actor.transfer_queue.records import Put


class Dealer(Reporter):
    """A ledger as the trainer sees it."""

    def lease_batch(self, holder: Holder, version: PolicyVersion, now: float) -> BatchLease | None:
        """Lend the next batch to the trainer; None while it has to wait (see `waiting_on`).

        Asked again by the same holder, the same batch is told again: the first answer may be lost.
        """
        if not self._may_deal(holder, version, now):
            return None
        lent = self._state.leases.batch
        if lent is not None:
            return self._part(lent, version)
        if reason := self._why_skip():
            return self._part(self._lease_batch(holder, (), version, skipped=reason), version)
        chosen = choose_batch(
            self._state.index.started,
            self._state.index.complete,
            version=version,
            max_staleness=self.config.max_staleness,
            groups_per_batch=self.config.groups_per_batch,
            wanted=self._wanted(),
        )
        return self._part(self._lease_batch(holder, chosen, version), version) if chosen else None

    def lease_part(
        self, holder: Holder, version: PolicyVersion, lease_id: LeaseId | None, have: int, now: float
    ) -> BatchLease | None:
        """Lend the next groups of a batch that need not be whole yet; None while there are none.

        They are all of the same lease, which lasts from each part anew, and go back together when it ends:
        a part of another lease than `lease_id` begins the batch again.

        Args:
            holder: the trainer.
            version: the trainer's.
            lease_id: of the parts it has.
            have: how many groups it has of that lease.
            now: seconds of the queue's clock.
        """
        if not self._may_deal(holder, version, now, in_parts=True):
            return None
        if self._state.leases.batch is None and (reason := self._why_skip()):
            return self._part(self._lease_batch(holder, (), version, skipped=reason), version)
        self._deal_more(holder, version)
        lent = self._state.leases.batch
        if lent is None:
            return None
        have = have if lent.lease_id == lease_id else 0
        return self._part(lent, version, have) if lent.is_whole or len(lent.dealt) > have else None

    def ack_batch(self, trained: BatchTrained, holder: Holder, now: float) -> Put:
        """Count a batch as trained and its version as published.

        A trainer that is told `stale` has trained on samples that are not its own any more (its lease ended):
        it must go back to a checkpoint.
        """
        self._tick(now)
        lease = self._state.leases.batch
        key = trained.lease_id, holder, True
        held = lease is not None and (lease.lease_id, lease.holder, lease.is_whole) == key
        if not held:
            return self._refuse(holder, duplicate=trained.lease_id == self._state.last_acked)
        if self._goes_back(trained.policy_version):
            return Put.STALE
        self._emit(BatchAcked(trained=trained))
        self._drop_stale()
        self._drop_surplus()
        return Put.ACCEPTED

    def _may_deal(
        self, holder: Holder, version: PolicyVersion, now: float, *, in_parts: bool = False
    ) -> bool:
        """Whether this trainer may have a batch; what it got for an older version is taken back."""
        if not self._admits(holder, now) or not self._is_newest(version):
            return False
        lent = self._state.leases.batch
        if lent is None:
            return True
        if lent.holder != holder:
            return False
        if lent.version != version or not (in_parts or lent.is_whole):
            self._end([lent], failed=False)  # some of it may be too old now
        return True

    def _deal_more(self, holder: Holder, version: PolicyVersion) -> None:
        """Put into the batch what can be dealt now, and give its lease more time where that is needed."""
        lent, wanted = self._state.leases.batch, self._wanted()
        if lent is None:
            if chosen := self._next_groups(version, wanted):
                self._lease_batch(holder, chosen, version, is_whole=len(chosen) >= wanted)
            return
        if lent.is_whole:
            return
        chosen = self._next_groups(version, wanted - len(lent.dealt))
        dealt = len(lent.dealt) + len(chosen)
        is_half_over = lent.until_s - self._now_s < self.config.batch_lease_s / 2
        if chosen or dealt >= wanted or is_half_over:
            event = BatchExtended(
                lease_id=lent.lease_id,
                group_ids=chosen,
                until_s=self._now_s + self.config.batch_lease_s,
                sampling=self._sampling(len(chosen), ""),
                is_whole=dealt >= wanted,
            )
            self._emit(event)

    def _next_groups(self, version: PolicyVersion, left: int) -> tuple[GroupId, ...]:
        """Return what can be dealt now of the `left` groups that the batch has still to get."""
        if self.config.is_in_order:
            return self._next_in_order(left)
        return choose_part(
            self._state.index.started,
            self._state.index.complete,
            version=version,
            max_staleness=self.config.max_staleness,
            groups_per_batch=self.config.groups_per_batch,
            left=left,
        )

    def _next_in_order(self, left: int) -> tuple[GroupId, ...]:
        """Return complete groups before which none is missing: a batch is then always the same one."""
        chosen: list[GroupId] = []
        for group_id in sorted(self._state.groups):
            group = self._state.groups[group_id]
            if not group.is_train or group.dealt:
                continue
            is_one_to_come = self.room() > 0 and self.next_group() < group_id
            if len(chosen) >= left or not group.complete or is_one_to_come:
                break
            chosen.append(group_id)
        return tuple(chosen)

    def _lease_batch(
        self,
        holder: Holder,
        group_ids: tuple[GroupId, ...],
        version: PolicyVersion,
        *,
        skipped: str = "",
        is_whole: bool = True,
    ) -> Lease:
        event = BatchLeased(
            lease_id=self._state.leases.next_id,
            holder=holder,
            group_ids=group_ids,
            version=version,
            since_s=self._now_s,
            until_s=self._now_s + self.config.batch_lease_s,
            sampling=self._sampling(len(group_ids), skipped),
            is_whole=is_whole,
        )
        self._emit(event)
        return self._state.leases.leases[event.lease_id]

    def _part(self, lease: Lease, version: PolicyVersion, have: int = 0) -> BatchLease:
        """Return what a batch lease has beyond the first `have` groups."""
        groups = [self._state.groups[group_id] for group_id in lease.dealt[have:]]
        return BatchLease(
            lease_id=lease.lease_id,
            samples=tuple(sample for group in groups for sample in train_samples(group)),
            policy_version=version,
            sampling=self._state.dealt,
            is_whole=lease.is_whole,
            groups_so_far=len(lease.dealt),
        )

    def _why_skip(self) -> str:
        """Say why the next step has nothing to train on, although no further group will come for it."""
        here, needed = self._state.train_groups, min(self.config.groups_per_batch, self._left())
        is_short = self._is_refilled() and here < needed and self._is_settled()
        if not is_short or (here and self.config.trains_short_batches):
            return ""
        filtered = self._state.totals.filtered
        return f"{filtered} groups of equal rewards were filtered, {here} of {needed} are left"

    def _sampling(self, dealt: int, skipped: str) -> BatchSampling:
        filtered = self._state.totals.filtered
        return BatchSampling(
            filtered=filtered,
            refilled=min(filtered, self.config.max_filtered),
            carried=sum(map(len, self._state.index.complete.values())) - dealt,
            skipped=skipped,
        )
