"""What the trainer gets: whole groups, a short batch, or the word that there is nothing to train on."""

from relax_actor.ids import GroupId, Holder, PolicyVersion
from relax_actor.protocol import BatchLease, BatchSampling, BatchTrained
from relax_actor.transfer_queue.ledger.groups import train_samples
from relax_actor.transfer_queue.ledger.leases import Lease
from relax_actor.transfer_queue.ledger.reporter import Reporter
from relax_actor.transfer_queue.ledger.selection import choose_batch
from relax_actor.transfer_queue.records import BatchAcked, BatchLeased, Put


class Dealer(Reporter):
    """A ledger as the trainer sees it."""

    def lease_batch(self, holder: Holder, version: PolicyVersion, now: float) -> BatchLease | None:
        """Lend the next batch to the trainer; None while it has to wait (see `waiting_on`).

        Asked again by the same holder, the same batch is told again: the first answer may be lost.
        """
        if not self._admits(holder, now):
            return None
        if not self._is_newest(version):
            return None
        lent = self._state.leases.batch
        if lent is not None and (lent.holder != holder or lent.version == version):
            return self._batch(lent, version) if lent.holder == holder else None
        if lent is not None:
            self._end([lent], failed=False)  # dealt for another version: some of it may be too old now
        if reason := self._why_skip():
            return self._lease_batch(holder, (), version, skipped=reason)
        chosen = choose_batch(
            self._state.index.started,
            self._state.index.complete,
            version=version,
            max_staleness=self.config.max_staleness,
            groups_per_batch=self.config.groups_per_batch,
            wanted=self._wanted(),
        )
        return self._lease_batch(holder, chosen, version) if chosen else None

    def ack_batch(self, trained: BatchTrained, holder: Holder, now: float) -> Put:
        """Count a batch as trained and its version as published.

        A trainer that is told `stale` has trained on samples that are not its own any more (its lease ended):
        it must go back to a checkpoint.
        """
        self._tick(now)
        lease = self._state.leases.batch
        held = lease is not None and (lease.lease_id, lease.holder) == (trained.lease_id, holder)
        if not held:
            return self._refuse(holder, duplicate=trained.lease_id == self._state.last_acked)
        if self._goes_back(trained.policy_version):
            return Put.STALE
        self._emit(BatchAcked(trained=trained))
        self._drop_stale()
        self._drop_surplus()
        return Put.ACCEPTED

    def _lease_batch(
        self, holder: Holder, group_ids: tuple[GroupId, ...], version: PolicyVersion, *, skipped: str = ""
    ) -> BatchLease:
        event = BatchLeased(
            lease_id=self._state.leases.next_id,
            holder=holder,
            group_ids=group_ids,
            version=version,
            since_s=self._now_s,
            until_s=self._now_s + self.config.batch_lease_s,
            sampling=self._sampling(len(group_ids), skipped),
        )
        self._emit(event)
        return self._batch(self._state.leases.leases[event.lease_id], version)

    def _batch(self, lease: Lease, version: PolicyVersion) -> BatchLease:
        groups = [self._state.groups[group_id] for group_id in lease.group_ids]
        samples = tuple(sample for group in groups for sample in train_samples(group))
        return BatchLease(
            lease_id=lease.lease_id, samples=samples, policy_version=version, sampling=self._state.dealt
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
