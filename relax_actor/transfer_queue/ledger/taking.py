"""What is put into the queue: samples, chunks of samples, rewards; each once, by who holds its lease.

A put of many rows is one event, but where one of them has to be refused or dropped in between.
"""

import math
from collections.abc import Collection, Sequence

from relax_actor.ids import Holder, LeaseId
from relax_actor.protocol import RewardReady, SampleChunk, SampleReady
from relax_actor.transfer_queue.events import ChunkPut, RewardsPut, SamplesPut
from relax_actor.transfer_queue.ledger.dealing import Dealer
from relax_actor.transfer_queue.ledger.groups import Row
from relax_actor.transfer_queue.records import LeaseKind, Put, RowKey


class Taker(Dealer):
    """A ledger as those see it who finish something."""

    def put_samples(self, samples: Sequence[SampleReady], holder: Holder, now: float) -> list[Put]:
        """Take finished samples from the rollout that holds their leases; return what became of each."""
        self._tick(now)
        outcomes: list[Put] = []
        taken: dict[RowKey, SampleReady] = {}
        for sample in samples:
            outcome = self._look_at_sample(sample, holder, taken)
            if outcome is Put.ACCEPTED:
                taken[sample.group_id, sample.sample_index] = sample
            elif outcome is Put.MISFIT:
                self._take_samples(taken)
                self._end([self._state.leases.leases[sample.lease_id]])
            outcomes.append(outcome)
        self._take_samples(taken)
        self._drop_stale()
        return outcomes

    def put_chunk(self, chunk: SampleChunk, holder: Holder, now: float) -> Put:
        """Take what there is of a sample from the rollout that holds its lease.

        The next lease of the sample carries it, if this one ends without the whole sample.
        """
        self._tick(now)
        key = (chunk.group_id, chunk.sample_index)
        row = self._state.row(key)
        if row is None or not self._holds(holder, chunk.lease_id, LeaseKind.PROMPT, key):
            return self._refuse(holder, duplicate=False)
        if row.chunk is not None and row.chunk.length >= chunk.length:
            return self._refuse(holder, duplicate=True)
        if not self._fits(chunk):
            self._end([self._state.leases.leases[chunk.lease_id]])
            return Put.MISFIT
        self._emit(ChunkPut(chunk=chunk))
        return Put.ACCEPTED

    def put_rewards(self, rewards: Sequence[RewardReady], holder: Holder, now: float) -> list[Put]:
        """Take rewards and return what became of each; None, or one that is not finite, drops its sample.

        A group of which too few samples are left is dropped and replaced.
        """
        self._tick(now)
        outcomes: list[Put] = []
        taken: dict[RowKey, RewardReady] = {}
        for reward in rewards:
            key = reward.group_id, reward.sample_index
            if not self._is_lent(holder, reward.lease_id, LeaseKind.REWARD, key, taken):
                scored_under = taken[key].lease_id if key in taken else _lease_of_reward(self._state.row(key))
                outcomes.append(self._refuse(holder, duplicate=scored_under == reward.lease_id))
            elif reward.reward is None or not math.isfinite(reward.reward):
                self._take_rewards(taken)
                self._drop_sample(*key, reward.reason or f"the reward is {reward.reward}")
                outcomes.append(Put.ACCEPTED)
            else:
                taken[key] = reward
                outcomes.append(Put.ACCEPTED)
        self._take_rewards(taken)
        return outcomes

    def _look_at_sample(self, sample: SampleReady, holder: Holder, taken: dict[RowKey, SampleReady]) -> Put:
        key = sample.group_id, sample.sample_index
        if not self._is_lent(holder, sample.lease_id, LeaseKind.PROMPT, key, taken):
            row = self._state.row(key)
            known = taken.get(key, None if row is None else row.sample)
            return self._refuse(holder, duplicate=known is not None and known.lease_id == sample.lease_id)
        return Put.ACCEPTED if self._fits(sample) else Put.MISFIT

    def _is_lent(
        self, holder: Holder, lease_id: LeaseId, kind: LeaseKind, key: RowKey, taken: Collection[RowKey]
    ) -> bool:
        return key not in taken and self._holds(holder, lease_id, kind, key)

    def _take_samples(self, taken: dict[RowKey, SampleReady]) -> None:
        if taken:
            self._emit(SamplesPut(samples=tuple(taken.values())))
            taken.clear()

    def _take_rewards(self, taken: dict[RowKey, RewardReady]) -> None:
        if not taken:
            return
        self._emit(RewardsPut(rewards=tuple(taken.values())))
        group_ids = dict.fromkeys(group_id for group_id, _ in taken)
        taken.clear()
        for group_id in group_ids:
            self._drop_if_useless(self._state.groups[group_id])


def _lease_of_reward(row: Row | None) -> LeaseId | None:
    return None if row is None else row.reward_lease_id
