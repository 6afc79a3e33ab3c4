"""What the ledger promises, one situation at a time."""

import json
import math

import msgspec
import pytest
from queue_rows import chunk_of, ref, sample_of

from relax_actor.ids import Holder
from relax_actor.protocol import (
    BatchTrained,
    FinishReason,
    PromptGroup,
    Purpose,
    RewardReady,
    TensorRef,
)
from relax_actor.transfer_queue.ledger import Ledger, LedgerConfig
from relax_actor.transfer_queue.ledger.fold import apply
from relax_actor.transfer_queue.ledger.groups import Group, RowState, reward_task, train_samples
from relax_actor.transfer_queue.ledger.ordered import OrderedSet
from relax_actor.transfer_queue.records import (
    DroppedGroup,
    DroppedPosition,
    DroppedSample,
    DropReason,
    LeaseKind,
    Put,
    Refusal,
    TrainedSet,
)
from relax_actor.transfer_queue.rules import PartialPolicy

R0, R1 = Holder("rollout/0", 1), Holder("rollout/1", 1)
SCORER = Holder("reward/0", 1)
TRAINER = Holder("trainer/0", 1)


def config(**changes):
    base = LedgerConfig(
        groups_per_batch=2,
        samples_per_prompt=2,
        max_staleness=0,
        total_groups=8,
        min_valid_samples=2,
        max_attempts=1,
        prompt_lease_s=30.0,
        reward_lease_s=20.0,
        batch_lease_s=60.0,
        group_deadline_s=100.0,
    )
    return msgspec.structs.replace(base, **changes)


def prompt(group_id, samples=2, **fields):
    fields = {"label": "4", "origin": f"data.jsonl:{group_id + 1}", **fields}
    return PromptGroup(group_id=group_id, tokens=ref(f"prompt{group_id}"), samples=samples, **fields)


def whole(lease, index, **fields):
    return sample_of(lease, index, ref(f"sample{lease.lease_id}.{index}"), **fields)


class Loop:
    """A ledger and the moves of the actors around it."""

    def __init__(self, **changes):
        self.ledger = Ledger(config(**changes))
        self.now = 0.0
        self.version = 0
        self.step = 0
        self.ledger.published(0, self.now)

    def submit(self, count=None):
        count = self.ledger.room() if count is None else count
        samples = self.ledger.config.samples_per_prompt
        for _ in range(count):
            assert self.ledger.submit(prompt(self.ledger.next_group(), samples), self.now)

    def lease(self, holder=R0, slots=100):
        return self.ledger.lease_prompts(holder, self.version, slots, self.now)

    def put(self, lease, index, holder=R0, *, oldest=None, **fields):
        oldest = lease.policy_version if oldest is None else oldest
        put = whole(lease, index, oldest_version=oldest, newest_version=self.version, **fields)
        return self.ledger.put_samples([put], holder, self.now)[0]

    def put_chunk(self, lease, index, tokens, holder=R0, **fields):
        tensor = ref(f"chunk{lease.lease_id}.{index}.{tokens}", tokens)
        put = chunk_of(lease, index, tensor, newest_version=self.version, **fields)
        return self.ledger.put_chunk(put, holder, self.now)

    def sample(self, leases, holder=R0):
        for lease in leases:
            for index in lease.missing:
                assert self.put(lease, index, holder) is Put.ACCEPTED

    def tasks(self, rows=100, holder=SCORER):
        return self.ledger.lease_rewards(holder, rows, self.now)

    def reward(self, task, reward=1.0, reason="", holder=SCORER):
        ready = RewardReady(
            group_id=task.group_id,
            sample_index=task.sample_index,
            lease_id=task.lease_id,
            reward=reward,
            reason=reason,
        )
        return self.ledger.put_rewards([ready], holder, self.now)[0]

    def score(self):
        for task in self.tasks():
            assert self.reward(task) is Put.ACCEPTED

    def score_groups(self, rewards):
        """Score all that waits: the samples of each group alike, or not, as `rewards` says."""
        for task in self.tasks():
            reward = rewards(task.group_id)
            assert self.reward(task, reward if task.sample_index else 0.0) is Put.ACCEPTED

    def learn(self, rewards):
        """Bring prompts up, and whatever takes the place of those that were filtered."""
        while self.ledger.room():
            self.submit()
            self.sample(self.lease())
            self.score_groups(rewards)

    def ready(self, count=None):
        """Bring prompts up to where the trainer can have them."""
        self.submit(count)
        self.sample(self.lease())
        self.score()

    def batch(self, holder=TRAINER, version=None):
        return self.ledger.lease_batch(holder, self.version if version is None else version, self.now)

    def ack(self, batch, holder=TRAINER, version=None):
        version = self.version + 1 if version is None else version
        self.step += 1
        trained = BatchTrained(lease_id=batch.lease_id, step=self.step, policy_version=version)
        put = self.ledger.ack_batch(trained, holder, self.now)
        if put is Put.ACCEPTED:
            self.version = version
        return put

    def train(self):
        batch = self.batch()
        assert batch is not None, self.ledger.waiting_on()
        assert self.ack(batch) is Put.ACCEPTED
        return groups(batch)

    def dropped(self):
        return [(d.group_id, d.reason) for d in self.ledger.take_dropped()]


def groups(batch):
    return sorted({sample.group_id for sample in batch.samples})


# Prompts


def test_a_synchronous_run_deals_the_batches_in_order():
    loop = Loop()
    trained = []
    while not loop.ledger.finished():
        loop.ready()
        trained.append(loop.train())
    assert trained == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loop.ledger.accounting().trained == 16
    assert loop.ledger.room() == 0


def test_a_short_run_ends_although_the_window_is_wider():
    loop = Loop(max_staleness=4, total_groups=2)
    assert loop.ledger.room() == 2
    loop.ready()
    loop.train()
    assert loop.ledger.finished()


def test_room_is_the_staleness_window():
    loop = Loop(max_staleness=1, total_groups=100)
    assert loop.ledger.room() == 4
    loop.ready()
    assert loop.ledger.room() == 0
    loop.batch()
    assert loop.ledger.room() == 0, "in the trainer's hands is not trained yet"


def test_the_upcoming_prompts_are_those_there_is_room_for_holes_first():
    loop = Loop(max_staleness=1)
    assert loop.ledger.upcoming() == (0, 1, 2, 3)
    loop.ready()
    assert loop.ledger.upcoming() == ()
    loop.train()
    assert loop.ledger.upcoming() == (4, 5)
    loop.ledger.rewind(TrainedSet(extras=(1,), groups=1, samples=2), 9, 0.0)
    assert loop.ledger.upcoming() == (0, 4), "2 and 3 are still here"


def test_a_prompt_is_taken_once_and_in_turn():
    ledger = Ledger(config())
    assert not ledger.submit(prompt(1), 0.0)
    assert ledger.submit(prompt(0), 0.0)
    assert not ledger.submit(prompt(0), 0.0)
    assert ledger.submit(prompt(1), 0.0)
    assert not ledger.submit(prompt(2), 0.0), "no room"
    assert ledger.refused == {Refusal.OUT_OF_TURN: 2, Refusal.DUPLICATE: 1}


def test_a_trained_prompt_is_not_taken_again():
    loop = Loop()
    loop.ready()
    loop.train()
    assert not loop.ledger.submit(prompt(0), 0.0)
    assert loop.ledger.refused == {Refusal.DUPLICATE: 1}


@pytest.mark.parametrize(
    "wrong",
    [prompt(0, samples=0), prompt(-1), prompt(0, purpose=Purpose.EVAL)],
    ids=["no samples", "negative train id", "positive eval id"],
)
def test_an_impossible_prompt_is_an_error(wrong):
    with pytest.raises(ValueError, match="cannot be for"):
        Ledger(config()).submit(wrong, 0.0)


def test_a_rejected_prompt_is_counted_and_replaced():
    loop = Loop()
    loop.submit(1)
    assert loop.ledger.reject(0, "700 tokens, the context is 512", 0.0)
    assert loop.ledger.reject(1, "too long", 0.0, origin="data.jsonl:2")
    assert not loop.ledger.reject(1, "again", 0.0)
    assert not loop.ledger.reject(5, "not next", 0.0)
    assert loop.ledger.dropped_by_reason() == {"rejected": 4}
    assert [d.origin for d in loop.ledger.take_dropped()] == ["data.jsonl:1", "data.jsonl:2"]
    loop.ready()
    assert loop.train() == [2, 3]
    assert loop.ledger.accounting().balances


def test_a_prompt_in_the_trainers_hands_is_not_rejected():
    loop = Loop()
    loop.ready()
    loop.batch()
    assert not loop.ledger.reject(0, "too long", 0.0)


def test_the_last_batch_of_an_ended_stream_may_be_smaller():
    loop = Loop()
    loop.submit(1)
    loop.sample(loop.lease())
    loop.score()
    assert loop.batch() is None
    loop.ledger.end_stream(0.0)
    loop.ledger.end_stream(0.0)
    assert loop.ledger.room() == 0
    assert loop.train() == [0]
    assert loop.ledger.finished()


def test_dropping_everything_is_hopeless_in_the_end():
    loop = Loop(refill_limit=2)
    for position in range(3):
        assert loop.ledger.hopeless() == ""
        loop.ledger.reject(position, "too long", 0.0, origin=f"data.jsonl:{position + 1}")
    assert "3 groups were dropped since the last trained batch (limit 2)" in loop.ledger.hopeless()
    assert "group 2 (data.jsonl:3): rejected: too long" in loop.ledger.hopeless()


def test_a_trained_batch_brings_hope_back():
    loop = Loop(refill_limit=1)
    loop.ledger.reject(0, "too long", 0.0)
    loop.ready()
    loop.train()
    loop.ledger.reject(3, "too long", 0.0)
    assert loop.ledger.hopeless() == ""


# Rollouts


def test_only_a_rollout_at_the_newest_version_gets_prompts():
    loop = Loop()
    loop.submit()
    assert loop.ledger.lease_prompts(R0, 1, 8, 0.0) == []
    loop.ledger.published(1, 0.0)
    assert loop.ledger.lease_prompts(R0, 0, 8, 0.0) == []
    assert len(loop.ledger.lease_prompts(R0, 1, 8, 0.0)) == 2
    assert loop.ledger.refused == {Refusal.VERSION: 2}


def test_nobody_gets_prompts_before_a_version_is_published():
    ledger = Ledger(config())
    ledger.submit(prompt(0), 0.0)
    assert ledger.lease_prompts(R0, 0, 8, 0.0) == []
    assert ledger.version is None


def test_slots_smaller_than_a_group_take_a_part_of_it():
    loop = Loop(samples_per_prompt=4)
    loop.submit()
    (first,) = loop.lease(R0, slots=3)
    assert (first.group.group_id, first.missing) == (0, (0, 1, 2))
    (other,) = loop.lease(R1, slots=3)
    assert (other.group.group_id, other.missing) == (1, (0, 1, 2))
    (rest,) = loop.lease(R0, slots=3)
    assert (rest.group.group_id, rest.missing) == (0, (3,))
    assert loop.lease(R0, slots=3) == []


def test_what_a_rollout_left_of_a_group_goes_to_another_once_it_has_put_its_part():
    loop = Loop(samples_per_prompt=2)
    loop.submit(1)
    (part,) = loop.lease(R0, slots=1)
    assert loop.lease(R1) == []
    loop.sample([part])
    (rest,) = loop.lease(R1)
    assert rest.missing == (1,)


def test_no_slots_no_prompts():
    loop = Loop()
    loop.submit()
    assert loop.lease(slots=0) == []


def test_a_repeated_sample_is_a_duplicate_and_a_late_one_is_stale():
    loop = Loop()
    loop.submit()
    lease, _ = loop.lease()
    assert loop.put(lease, 0) is Put.ACCEPTED
    assert loop.put(lease, 0) is Put.DUPLICATE
    assert loop.put(lease, 1, R1) is Put.STALE
    assert loop.put(lease, 7) is Put.STALE
    loop.ledger.holder_gone("rollout/0", 1, 0.0)
    assert loop.put(lease, 1) is Put.STALE
    assert loop.ledger.refused == {Refusal.DUPLICATE: 1, Refusal.STALE_LEASE: 2, Refusal.OLD_INCARNATION: 1}


def test_a_dead_rollouts_prompts_come_back_at_once():
    loop = Loop()
    loop.submit()
    first, second = loop.lease()
    loop.put(first, 0)
    loop.ledger.holder_gone("rollout/0", 1, 0.0)
    again = loop.lease(R1)
    assert [(lease.group.group_id, lease.missing) for lease in again] == [(0, (1,)), (1, (0, 1))]
    assert second.lease_id not in {lease.lease_id for lease in again}


def test_a_new_incarnation_ends_the_leases_of_the_old_one():
    loop = Loop()
    loop.submit()
    (lease,) = loop.lease(slots=2)
    (again, _) = loop.lease(Holder("rollout/0", 2))
    assert again.group.group_id == 0
    assert loop.put(lease, 0) is Put.STALE
    assert loop.lease(R0) == []
    assert loop.ledger.refused[Refusal.OLD_INCARNATION] == 2


def test_a_death_told_late_does_not_touch_the_new_incarnation():
    loop = Loop()
    loop.submit()
    leases = loop.lease(Holder("rollout/0", 2))
    loop.ledger.holder_gone("rollout/0", 1, 0.0)
    loop.sample(leases, Holder("rollout/0", 2))


def test_a_prompt_that_kills_its_rollouts_is_dropped_as_poison():
    loop = Loop(max_attempts=1)
    loop.submit(1)
    for incarnation in (1, 2):
        assert loop.lease(Holder("rollout/0", incarnation), slots=1)
        assert loop.lease(Holder("rollout/0", incarnation), slots=1), "two leases of one group"
        loop.ledger.holder_gone("rollout/0", incarnation, 0.0)
    (dropped,) = loop.ledger.take_dropped()
    assert dropped == DroppedGroup(
        group_id=0,
        samples=2,
        reason=DropReason.POISON,
        detail="2 replicas died or timed out on it",
        origin="data.jsonl:1",
    )
    assert loop.ledger.next_group() == 1
    assert loop.ledger.room() == 2


def test_a_lease_that_runs_out_names_who_was_late():
    loop = Loop()
    loop.submit(1)
    (lease,) = loop.lease()
    assert loop.ledger.next_deadline() == 30.0
    assert loop.ledger.expire(29.9) == []
    (expired,) = loop.ledger.expire(30.0)
    assert (expired.kind, expired.holder, expired.group_ids) == (LeaseKind.PROMPT, R0, (0,))
    assert loop.put(lease, 0) is Put.STALE
    assert loop.ledger.next_deadline() is None, "waiting for a rollout has no deadline"


def test_a_sample_that_never_comes_ends_its_group_by_the_deadline():
    loop = Loop(group_deadline_s=5.0)
    loop.submit(1)
    (lease,) = loop.lease()
    loop.put(lease, 0)
    assert loop.ledger.next_deadline() == 5.0
    loop.ledger.expire(5.0)
    (dropped,) = loop.ledger.take_dropped()
    assert dropped.reason is DropReason.DEADLINE
    assert "1 of 2 samples run on rollout/0#1 for 5.0 s" in dropped.detail
    assert loop.ledger.room() == 2


def test_a_complete_group_has_no_deadline():
    loop = Loop()
    loop.ready()
    assert loop.ledger.next_deadline() is None


def test_a_rollout_that_says_what_it_knows_gives_the_rest_back():
    loop = Loop(max_attempts=0)
    loop.submit()
    kept, _ = loop.lease()
    loop.ledger.retain(R0, [kept.lease_id], 0.0)
    (again,) = loop.lease(R1)
    assert again.group.group_id == 1, "and it costs no attempt"
    assert loop.put(kept, 0) is Put.ACCEPTED


# Rewards


def test_rewards_are_leased_in_one_loan():
    loop = Loop()
    loop.submit()
    loop.sample(loop.lease())
    tasks = loop.tasks(3)
    assert [(task.group_id, task.sample_index) for task in tasks] == [(0, 0), (0, 1), (1, 0)]
    assert len({task.lease_id for task in tasks}) == 1
    assert tasks[0].label == "4"
    assert [(t.group_id, t.sample_index) for t in loop.tasks()] == [(1, 1)]
    assert loop.tasks() == []


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_drops_its_sample_only(reward):
    loop = Loop(samples_per_prompt=3)
    loop.submit()
    loop.sample(loop.lease())
    first, *others = loop.tasks()
    assert loop.reward(first, reward) is Put.ACCEPTED
    assert loop.reward(first, reward) is Put.DUPLICATE
    for task in others:
        loop.reward(task)
    assert loop.ledger.dropped_by_reason() == {"unscored": 1}
    (dropped,) = loop.ledger.take_dropped()
    assert isinstance(dropped, DroppedSample)
    assert dropped.detail == f"the reward is {reward}"
    batch = loop.batch()
    assert [(s.group_id, s.sample_index) for s in batch.samples] == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    loop.ack(batch)
    assert (loop.ledger.accounting().trained, loop.ledger.accounting().dropped) == (5, 1)


def test_a_group_with_too_few_rewards_is_dropped_and_replaced():
    loop = Loop()
    loop.submit()
    loop.sample(loop.lease())
    first, *others = loop.tasks()
    loop.reward(first, None, "ValueError: boom")
    for task in others:
        loop.reward(task)
    sample, group = loop.ledger.take_dropped()
    assert sample.reason is DropReason.UNSCORED
    assert group.reason is DropReason.FEW_VALID
    assert group.detail == "1 of 2 samples have a reward, 2 are needed: ValueError: boom"
    assert loop.ledger.dropped_by_reason() == {"few valid samples": 2}
    assert loop.ledger.room() == 1


def test_a_group_whose_last_sample_fails_is_dropped_too():
    loop = Loop(groups_per_batch=1)
    loop.submit()
    loop.sample(loop.lease())
    first, last = loop.tasks()
    loop.reward(first)
    loop.reward(last, None, "timeout")
    assert loop.dropped() == [(0, DropReason.UNSCORED), (0, DropReason.FEW_VALID)]


def test_a_dead_reward_actors_samples_come_back():
    loop = Loop()
    loop.submit()
    loop.sample(loop.lease())
    tasks = loop.tasks()
    loop.ledger.holder_gone("reward/0", 1, 0.0)
    assert loop.reward(tasks[0]) is Put.STALE
    assert len(loop.tasks(holder=Holder("reward/0", 2))) == 4


def test_a_sample_that_kills_its_scorers_is_dropped():
    loop = Loop(max_attempts=1, groups_per_batch=1)
    loop.submit()
    loop.sample(loop.lease())
    loop.tasks()
    loop.now = 20.0
    (expired,) = loop.ledger.expire(20.0)
    assert expired.kind is LeaseKind.REWARD
    loop.tasks()
    loop.ledger.expire(40.0)
    first, *_ = loop.ledger.take_dropped()
    assert first.detail == "2 reward actors died or timed out on it"
    assert loop.ledger.dropped_by_reason() == {"few valid samples": 2}


# The trainer


def test_a_batch_is_told_again_to_who_has_it_and_to_nobody_else():
    loop = Loop()
    loop.ready()
    batch = loop.batch()
    assert loop.batch() == batch
    assert loop.batch(Holder("trainer/1", 1)) is None
    assert loop.ack(batch, Holder("trainer/1", 1)) is Put.STALE
    assert loop.ack(batch) is Put.ACCEPTED
    assert loop.ack(batch) is Put.DUPLICATE


def test_a_trainer_at_another_version_gets_nothing():
    loop = Loop()
    loop.ready()
    assert loop.batch(version=1) is None
    assert loop.ledger.refused == {Refusal.VERSION: 1}


def test_a_dead_trainers_batch_is_dealt_again():
    loop = Loop()
    loop.ready()
    batch = loop.batch()
    loop.ledger.holder_gone("trainer/0", 1, 0.0)
    assert loop.batch() is None, "the dead do not lease"
    again = loop.batch(Holder("trainer/0", 2))
    assert again.samples == batch.samples
    assert loop.ack(batch) is Put.STALE


def test_a_batch_that_took_too_long_is_taken_back():
    loop = Loop()
    loop.ready()
    batch = loop.batch()
    (expired,) = loop.ledger.expire(60.0)
    assert (expired.kind, expired.holder) == (LeaseKind.BATCH, TRAINER)
    assert loop.ack(batch) is Put.STALE
    assert loop.batch().samples == batch.samples


def test_an_ack_with_an_older_version_is_refused():
    loop = Loop()
    loop.ready()
    batch = loop.batch()
    loop.ledger.published(5, 0.0)
    assert loop.ack(batch, version=4) is Put.STALE
    assert loop.ledger.refused == {Refusal.VERSION: 1}
    assert loop.ack(batch, version=6) is Put.ACCEPTED


def test_a_batch_dealt_for_another_version_is_dealt_anew_or_dropped_as_stale():
    loop = Loop(max_staleness=0)
    loop.ready()
    loop.batch()
    loop.version = 1
    loop.ledger.published(1, 0.0)
    assert loop.batch() is None
    assert loop.dropped() == [(0, DropReason.STALE), (1, DropReason.STALE)]


def test_versions_never_go_back():
    ledger = Ledger(config())
    assert ledger.published(3, 0.0)
    assert ledger.published(3, 0.0)
    assert not ledger.published(2, 0.0)
    assert ledger.version == 3
    assert ledger.refused == {Refusal.VERSION: 1}


def test_what_became_too_old_is_dropped_and_replaced():
    loop = Loop(max_staleness=1)
    loop.ready(2)
    loop.submit()
    loop.ledger.published(1, 0.0)
    assert loop.dropped() == []
    loop.ledger.published(2, 0.0)
    (first, second) = loop.ledger.take_dropped()
    assert (first.group_id, second.group_id) == (0, 1)
    assert first.detail == "sampled by version 0, the trainer is at 2"
    assert loop.ledger.room() == 2


def test_an_ack_that_skips_versions_drops_what_became_too_old():
    loop = Loop(max_staleness=1)
    loop.ready()
    assert loop.ack(loop.batch(), version=2) is Put.ACCEPTED
    assert loop.dropped() == [(2, DropReason.STALE), (3, DropReason.STALE)]


def test_a_sample_that_is_too_old_when_it_comes_is_dropped():
    loop = Loop(max_staleness=0)
    loop.version = 5
    loop.ledger.published(5, 0.0)
    loop.submit()
    lease, _ = loop.lease()
    assert loop.put(lease, 0, oldest=4) is Put.ACCEPTED
    assert loop.dropped() == [(0, DropReason.STALE)]


def test_the_batch_waits_for_a_group_that_is_due():
    loop = Loop(max_staleness=1, groups_per_batch=1, total_groups=9)
    loop.submit()
    slow, fast = loop.lease()
    loop.sample([fast])
    loop.score()
    assert loop.train() == [1], "nothing is due at the first version"
    loop.submit()
    loop.sample(loop.lease(R1), R1)
    loop.score()
    assert loop.batch() is None, "group 2 is complete, but group 0 must not get older"
    assert "group 0 (data.jsonl:1): 2 of 2 samples run on rollout/0#1" in loop.ledger.waiting_on()
    loop.sample([slow])
    loop.score()
    assert loop.train() == [0]
    assert loop.train() == [2]


def test_a_batch_never_makes_a_later_one_too_stale():
    """Groups 1 and 2 are due at version 2, one group a batch: one of them has to be trained at version 1."""
    loop = Loop(max_staleness=2, groups_per_batch=1, total_groups=9)
    loop.submit()
    first, *slow = loop.lease()
    loop.sample([first])
    loop.score()
    assert loop.train() == [0]
    loop.submit()
    loop.sample(loop.lease(R1), R1)
    loop.score()
    assert loop.batch() is None
    loop.sample([slow[1]])
    loop.score()
    assert [loop.train()] == [[2]]
    loop.sample([slow[0]])
    loop.score()
    assert [loop.train(), loop.train()] == [[1], [3]]
    assert loop.ledger.dropped_by_reason() == {}


# Memory


def test_a_segment_is_freed_when_its_last_array_goes():
    loop = Loop()
    loop.submit()
    leases = loop.lease()
    loop.sample(leases)
    loop.score()
    assert loop.ledger.take_freed() == []
    kept = loop.ledger.segments()
    loop.train()
    assert sorted(loop.ledger.take_freed()) == sorted(kept)
    assert loop.ledger.take_freed() == []
    assert loop.ledger.segments() == frozenset()


def test_a_segment_used_again_before_it_was_taken_is_not_freed():
    loop = Loop()
    group = msgspec.structs.replace(prompt(0), tokens=ref("shared"))
    loop.ledger.submit(group, 0.0)
    loop.ledger.reject(0, "too long", 0.0)
    loop.ledger.submit(msgspec.structs.replace(prompt(1), tokens=ref("shared")), 0.0)
    assert loop.ledger.take_freed() == []
    loop.ledger.reject(1, "too long", 0.0)
    assert loop.ledger.take_freed() == ["shared"]


def test_the_media_of_a_prompt_stay_as_long_as_its_tokens_and_go_to_the_trainer():
    loop = Loop()
    media = {"pixel_values": ref("images"), "image_grid_thw": ref("images")}
    loop.ledger.submit(prompt(0, media=media), 0.0)
    loop.submit()
    leases = loop.lease()
    assert leases[0].group.media == media
    loop.sample(leases)
    loop.score()
    batch = loop.batch()
    assert batch.samples[0].media == media
    assert loop.ledger.needs("images")
    assert loop.ack(batch) is Put.ACCEPTED
    assert "images" in loop.ledger.take_freed()


def test_a_dropped_sample_frees_its_arrays_at_once():
    loop = Loop(samples_per_prompt=3)
    loop.submit(1)
    (lease,) = loop.lease()
    loop.sample([lease])
    loop.reward(loop.tasks()[0], None, "boom")
    assert loop.ledger.take_freed() == [f"sample{lease.lease_id}.0"]


# Evaluation


def eval_prompt(group_id=-1, **fields):
    return prompt(group_id, purpose=Purpose.EVAL, eval_set="gsm8k", **fields)


def test_an_evaluation_prompt_goes_beside_training():
    loop = Loop()
    loop.submit()
    assert loop.ledger.submit(eval_prompt(), 0.0)
    assert not loop.ledger.submit(eval_prompt(), 0.0)
    before = loop.ledger.accounting()
    assert before.submitted == 4
    assert [lease.group.group_id for lease in loop.lease()] == [-1, 0, 1]
    assert loop.ledger.open_evals == 1
    assert loop.ledger.accounting().running == 4


def test_an_evaluation_is_reported_once_with_its_rewards():
    loop = Loop()
    loop.ledger.submit(eval_prompt(), 0.0)
    loop.sample(loop.lease())
    first, second = loop.tasks()
    loop.reward(first, 1.0)
    assert loop.ledger.eval_results() == []
    loop.reward(second, None, "timeout")
    (result,) = loop.ledger.eval_results()
    assert (result.eval_set, result.policy_version, result.rewards, result.missing) == ("gsm8k", 0, (1.0,), 1)
    assert (result.mean_reward, result.detail) == (1.0, "timeout")
    assert loop.ledger.eval_results() == []
    assert loop.ledger.open_evals == 0
    assert loop.ledger.accounting().dropped == 0
    assert loop.ledger.segments() == frozenset()


def test_an_evaluation_that_is_given_up_is_reported_too():
    loop = Loop()
    loop.ledger.submit(eval_prompt(), 0.0)
    (lease,) = loop.lease()
    loop.put(lease, 0)
    loop.score()
    assert loop.ledger.reject(-1, "too long", 0.0)
    assert not loop.ledger.reject(-1, "too long", 0.0)
    assert loop.put(lease, 1) is Put.STALE
    (result,) = loop.ledger.eval_results()
    assert (result.rewards, result.missing, result.detail) == ((1.0,), 1, "rejected: too long")
    assert loop.ledger.submit(eval_prompt(), 0.0)
    assert loop.ledger.reject(-1, "too long", 0.0)
    (result,) = loop.ledger.eval_results()
    assert (result.mean_reward, result.policy_version) == (None, None)


def test_an_evaluation_survives_a_rewind():
    loop = Loop()
    for group_id in (-1, -2):
        loop.ledger.submit(eval_prompt(group_id), 0.0)
    finished, running = loop.lease()
    loop.sample([finished])
    loop.score()
    loop.ledger.rewind(TrainedSet(), 1, 0.0)
    loop.version = 1
    (result,) = loop.ledger.eval_results()
    assert (result.group_id, result.rewards) == (finished.group.group_id, (1.0, 1.0))
    (again,) = loop.lease()
    assert again.group == running.group


# Checkpoints


def test_a_rewind_samples_anew_what_the_checkpoint_has_not_trained():
    loop = Loop()
    loop.ready()
    loop.train()
    saved = loop.ledger.trained_groups()
    loop.ready()
    loop.train()
    loop.ready()
    old = loop.batch()
    loop.ledger.rewind(saved, 7, 0.0)
    assert loop.ack(old) is Put.STALE
    assert loop.ledger.regenerated == 8
    assert loop.ledger.accounting().balances
    loop.version = 7
    trained = []
    while not loop.ledger.finished():
        loop.ready()
        trained.append(loop.train())
    assert trained == [[2, 3], [4, 5], [6, 7]]


def test_a_rewind_keeps_prompts_that_are_next_and_withdraws_later_ones():
    loop = Loop(max_staleness=1)
    loop.ready()
    loop.train()
    loop.submit()
    assert loop.ledger.next_group() == 6
    loop.ledger.take_freed()
    loop.ledger.rewind(TrainedSet(), 7, 0.0)
    assert "prompt4" in loop.ledger.take_freed()
    assert (loop.ledger.next_group(), loop.ledger.room()) == (0, 2)
    loop.version = 7
    loop.submit()
    assert [lease.group.group_id for lease in loop.lease()] == [0, 1, 2, 3]


def test_a_rewind_to_a_lower_version_is_an_error():
    loop = Loop()
    with pytest.raises(ValueError, match="versions never go back"):
        loop.ledger.rewind(TrainedSet(), 0, 0.0)


def test_a_run_resumes_from_the_json_of_a_checkpoint():
    loop = Loop()
    loop.ledger.reject(0, "too long", 0.0, origin="data.jsonl:1")
    loop.ready()
    loop.train()
    data = json.dumps(msgspec.to_builtins(loop.ledger.trained_groups()))
    trained = msgspec.json.decode(data, type=TrainedSet)

    again = Ledger(config())
    again.resume(trained, 4, 0.0)
    assert again.next_group() == 3
    assert again.version == 4
    assert again.accounting() == loop.ledger.accounting()
    assert again.dropped_by_reason() == {"rejected": 2}
    assert again.trained_groups() == trained


def test_a_checkpoint_names_what_is_trained_ahead_of_the_others():
    loop = Loop(max_staleness=1, groups_per_batch=1)
    loop.submit()
    _, fast = loop.lease()
    loop.sample([fast])
    loop.score()
    loop.train()
    saved = loop.ledger.trained_groups()
    assert (saved.watermark, saved.extras, saved.groups) == (0, (1,), 1)
    again = Ledger(config())
    again.resume(saved, 1, 0.0)
    assert again.next_group() == 0
    again.submit(prompt(0), 0.0)
    assert again.next_group() == 2


def test_dropped_stays_dropped_over_a_rewind():
    loop = Loop()
    saved = loop.ledger.trained_groups()
    loop.ledger.reject(0, "too long", 0.0)
    loop.ledger.rewind(saved, 1, 0.0)
    assert loop.ledger.next_group() == 1
    assert loop.ledger.accounting().balances


def test_an_ended_stream_begins_again_with_a_rewind():
    loop = Loop()
    loop.ledger.end_stream(0.0)
    assert loop.ledger.finished()
    loop.ledger.rewind(TrainedSet(), 1, 0.0)
    assert not loop.ledger.finished()
    assert loop.ledger.room() == 2


# Seeing it


def test_it_says_what_the_trainer_waits_for():
    ledger = Ledger(config())
    assert ledger.waiting_on() == "the first policy version to be published"
    loop = Loop()
    said = [loop.ledger.waiting_on()]
    loop.submit(1)
    said.append(loop.ledger.waiting_on())
    leases = loop.lease()
    loop.ledger.expire(2.0)
    said.append(loop.ledger.waiting_on())
    loop.sample(leases)
    said.append(loop.ledger.waiting_on())
    loop.score()
    loop.ready()
    said.append(loop.ledger.waiting_on())
    batch = loop.batch()
    loop.ledger.expire(4.0)
    said.append(loop.ledger.waiting_on())
    assert said == [
        "prompts: 2 more may be submitted, 0 of 2 groups are here",
        "group 0 (data.jsonl:1): 2 of 2 samples wait for a rollout",
        "group 0 (data.jsonl:1): 2 of 2 samples run on rollout/0#1 for 2.0 s",
        "group 0 (data.jsonl:1): 2 of 2 samples wait for a reward actor",
        "nothing: a batch is ready",
        "trainer/0#1 to train on 2 groups, for 2.0 s",
    ]
    assert loop.ack(batch) is Put.ACCEPTED


def test_it_says_that_the_run_is_over():
    loop = Loop(total_groups=2)
    loop.ready()
    loop.train()
    assert loop.ledger.waiting_on() == "nothing: every group is trained or dropped"


def test_a_replayed_ledger_tells_nothing_twice():
    loop = Loop()
    loop.ready()
    loop.train()
    loop.ledger.reject(2, "too long", 0.0)
    again = Ledger.replay(config(), loop.ledger.take_events())
    assert again.take_freed() == []
    assert again.take_dropped() == []
    assert again.take_events() == []
    assert again.accounting() == loop.ledger.accounting()


def test_a_row_that_is_not_there_is_not_handed_out():
    group = Group.of(prompt(0))
    with pytest.raises(ValueError, match="a WAITING row has no sample"):
        reward_task(group, 0, 1)
    loop = Loop()
    loop.submit(1)
    loop.sample(loop.lease())
    group = loop.ledger._state.groups[0]
    group.rows[0].state = RowState.SCORED
    with pytest.raises(ValueError, match="has no reward"):
        train_samples(group)


def test_an_ordered_set_is_a_set_in_order():
    numbers = OrderedSet([5, 3])
    numbers.add(3)
    numbers.add(4)
    numbers.discard(3)
    numbers.discard(9)
    assert (numbers.first(), len(numbers), numbers.smallest(5)) == (4, 2, [4, 5])
    assert numbers == OrderedSet([4, 5])
    assert OrderedSet[int]().first() is None


def test_only_events_are_applied():
    with pytest.raises(TypeError, match="no event"):
        apply(Loop().ledger._state, "nonsense")


def test_leases_cost_what_is_ready_and_not_what_is_resident():
    """Looking for work touches no group that has none."""
    loop = Loop(max_staleness=0, groups_per_batch=3000, total_groups=3000, samples_per_prompt=1)
    loop.submit()
    leases = loop.lease(slots=3000)
    assert len(leases) == 3000
    index = loop.ledger._state.index
    assert index.waiting == {}
    assert loop.lease(R1) == []
    assert loop.batch() is None


def test_a_ledger_tells_which_arrays_it_needs_and_for_which_group():
    loop = Loop()
    loop.submit(1)
    (lease,) = loop.lease()
    loop.put(lease, 0)
    held = list(loop.ledger.holdings())
    assert {group_id for group_id, _ in held} == {lease.group.group_id}
    assert {each.segment for _, each in held} == set(loop.ledger.segments())


def test_a_ledger_knows_whether_the_trainer_has_something_to_do():
    """From when the last group of a batch is complete until it is acknowledged."""
    loop = Loop()
    assert not loop.ledger.has_batch()
    loop.ready()
    assert loop.ledger.has_batch()
    batch = loop.batch()
    assert loop.ledger.has_batch()
    loop.ack(batch)
    assert not loop.ledger.has_batch()


# Partial rollouts


def chunk_segments(loop):
    return sorted(segment for segment in loop.ledger.segments() if segment.startswith("chunk"))


def test_the_next_lease_carries_what_a_dead_rollout_had_sampled():
    loop = Loop()
    loop.submit()
    (first, _) = loop.lease()
    assert first.chunks == ()
    assert loop.put_chunk(first, 1, 4) is Put.ACCEPTED
    loop.ledger.holder_gone("rollout/0", 1, loop.now)

    again = loop.lease(R1)[0]
    assert again.missing == (0, 1)
    assert [(chunk.sample_index, chunk.length) for chunk in again.chunks] == [(1, 4)]
    assert loop.ledger.accounting().balances


def test_the_next_lease_carries_what_an_ended_lease_has_left():
    loop = Loop(max_attempts=5)
    loop.submit(1)
    (lease,) = loop.lease()
    loop.put_chunk(lease, 0, 4)
    loop.now = 31.0
    loop.ledger.expire(loop.now)

    assert loop.put_chunk(lease, 0, 8) is Put.STALE
    assert [chunk.length for chunk in loop.lease(R1)[0].chunks] == [4]


def test_a_longer_chunk_supersedes_a_shorter_one_whose_memory_is_freed():
    loop = Loop()
    loop.submit()
    lease = loop.lease()[0]
    loop.put_chunk(lease, 0, 4)
    assert loop.put_chunk(lease, 0, 8) is Put.ACCEPTED
    assert loop.ledger.take_freed() == ["chunk1.0.4"]
    assert loop.put_chunk(lease, 0, 8) is Put.DUPLICATE
    assert loop.put_chunk(lease, 0, 4) is Put.DUPLICATE
    assert chunk_segments(loop) == ["chunk1.0.8"]

    assert loop.put(lease, 0) is Put.ACCEPTED
    assert loop.ledger.take_freed() == ["chunk1.0.8"]
    assert loop.put_chunk(lease, 0, 12) is Put.STALE, "the sample is finished"
    assert chunk_segments(loop) == []


def test_a_chunk_of_someone_elses_lease_or_of_no_sample_is_refused():
    loop = Loop()
    loop.submit()
    lease = loop.lease()[0]
    assert loop.put_chunk(lease, 0, 4, R1) is Put.STALE
    assert loop.put_chunk(lease, 7, 4) is Put.STALE
    assert chunk_segments(loop) == []


def test_a_sample_is_as_old_as_its_oldest_token_whoever_goes_on():
    """The group waits for its next rollout with its version, so that no batch leaves it behind (I3)."""
    loop = Loop(max_staleness=1)
    loop.submit()
    leases = loop.lease()
    loop.put_chunk(leases[0], 0, 4)
    loop.sample(leases[1:])
    loop.score()
    loop.ledger.holder_gone("rollout/0", 1, loop.now)
    assert loop.train() == [1, 2]

    again = next(lease for lease in loop.lease(R1) if lease.group.group_id == 0)
    assert (again.policy_version, again.chunks[0].oldest_version) == (1, 0)
    assert loop.batch() is None, "group 0 is due, and not complete"
    loop.put(again, 0, R1, oldest=0)
    loop.put(again, 1, R1)
    loop.score()
    assert 0 in loop.train()


def test_a_rewind_forgets_chunks_for_their_weights_are_gone():
    loop = Loop()
    loop.submit()
    lease = loop.lease()[0]
    loop.put_chunk(lease, 0, 4)
    loop.ledger.rewind(TrainedSet(), 1, loop.now)
    loop.version = 1
    assert loop.lease()[0].chunks == ()
    assert chunk_segments(loop) == []


def test_a_dropped_group_frees_its_chunks():
    loop = Loop()
    loop.submit()
    lease = loop.lease()[0]
    loop.put_chunk(lease, 0, 4)
    loop.ledger.reject(0, "no", loop.now)
    assert chunk_segments(loop) == []


def test_chunks_survive_the_queue():
    loop = Loop()
    loop.submit()
    loop.put_chunk(loop.lease()[0], 0, 4)
    loop.ledger.holder_gone("rollout/0", 1, loop.now)
    again = Ledger.replay(loop.ledger.config, loop.ledger.take_events())
    assert again._state == loop.ledger._state
    assert again.lease_prompts(R1, 0, 9, loop.now)[0].chunks[0].length == 4


TIMED = {"partial_timeout_s": 25.0, "prompt_lease_s": 500.0}


def test_over_the_deadline_samples_end_with_the_tokens_they_have():
    loop = Loop(**TIMED, on_partial_timeout=PartialPolicy.FINISH, min_valid_samples=1)
    loop.submit(1)
    (lease,) = loop.lease()
    loop.put_chunk(lease, 0, 4)
    loop.now = 25.0
    loop.ledger.expire(loop.now)

    assert loop.put_chunk(lease, 0, 8) is Put.STALE, "so the rollout stops"
    assert loop.put(lease, 0) is Put.DUPLICATE
    assert loop.put(lease, 1) is Put.STALE
    (dropped,) = loop.ledger.take_dropped()
    assert (dropped.sample_index, dropped.detail) == (1, "no chunk after 25 s")
    (task,) = loop.tasks()
    assert (task.finish_reason, task.tokens.shape) == (FinishReason.ABORT, (4,))
    assert loop.reward(task) is Put.ACCEPTED
    assert loop.ledger.accounting().balances
    assert loop.ledger._state.leases.leases == {}


def test_a_group_whose_samples_were_ended_must_still_be_scored_in_time():
    loop = Loop(**TIMED, on_partial_timeout=PartialPolicy.FINISH)
    loop.submit(1)
    (lease,) = loop.lease()
    loop.put_chunk(lease, 0, 4)
    loop.put_chunk(lease, 1, 4)
    loop.now = 26.0
    loop.ledger.expire(loop.now)
    assert loop.dropped() == []
    assert loop.ledger.next_deadline() == 100.0
    loop.now = 100.0
    loop.ledger.expire(loop.now)
    assert loop.dropped() == [(0, DropReason.DEADLINE)]


def test_a_group_of_which_nothing_was_put_is_dropped_over_the_deadline():
    loop = Loop(**TIMED, on_partial_timeout=PartialPolicy.FINISH)
    loop.submit(1)
    loop.lease()
    loop.now = 25.0
    loop.ledger.expire(loop.now)
    assert loop.dropped()[-1] == (0, DropReason.FEW_VALID)
    assert loop.ledger.accounting().balances


@pytest.mark.parametrize(("policy", "dropped"), [("wait", []), ("drop", [(0, DropReason.DEADLINE)])])
def test_over_the_deadline_a_group_may_be_waited_for_or_dropped(policy, dropped):
    loop = Loop(**TIMED, on_partial_timeout=PartialPolicy(policy))
    loop.submit(1)
    loop.put_chunk(loop.lease()[0], 0, 4)
    loop.now = 25.0
    loop.ledger.expire(loop.now)
    assert loop.dropped() == dropped


def test_a_group_that_was_sampled_in_time_is_not_dropped_for_being_scored_later():
    loop = Loop(**TIMED, on_partial_timeout=PartialPolicy.DROP)
    loop.submit(1)
    loop.sample(loop.lease())
    loop.now = 25.0
    loop.ledger.expire(loop.now)
    assert loop.dropped() == []
    loop.score()
    assert loop.ledger.next_deadline() is None


def test_an_evaluation_prompt_over_the_deadline_has_the_result_of_what_there_is():
    loop = Loop(**TIMED, on_partial_timeout=PartialPolicy.FINISH)
    loop.ledger.submit(prompt(-1, purpose=Purpose.EVAL), loop.now)
    (lease,) = loop.lease()
    loop.put_chunk(lease, 0, 4)
    loop.now = 25.0
    loop.ledger.expire(loop.now)
    loop.score()
    (result,) = loop.ledger.eval_results()
    assert (result.rewards, result.missing) == ((1.0,), 1)


# Dynamic sampling

FILTERED = {"filters_zero_variance": True, "max_refills": 1}


def even(group_id):
    """Teach something by every second group."""
    return 1.0 if group_id % 2 == 0 else 0.0


def test_groups_of_equal_rewards_are_dropped_and_replaced():
    loop = Loop(**FILTERED)
    loop.learn(even)
    assert loop.dropped() == [(1, DropReason.ZERO_VARIANCE)]
    batch = loop.batch()
    assert groups(batch) == [0, 2]
    assert (batch.sampling.filtered, batch.sampling.refilled, batch.sampling.carried) == (1, 1, 0)
    assert loop.ledger.dropped_by_reason() == {"zero_variance": 2}
    assert loop.ledger.accounting().balances


def test_without_the_filter_groups_of_equal_rewards_are_trained():
    loop = Loop()
    loop.learn(lambda _: 0.0)
    assert loop.train() == [0, 1]


def test_each_batch_counts_what_was_filtered_for_it():
    loop = Loop(**FILTERED)
    loop.learn(even)
    loop.train()
    loop.learn(lambda _: 1.0)
    assert loop.batch().sampling.filtered == 0


def test_after_the_refills_a_batch_goes_short():
    loop = Loop(**FILTERED, total_groups=4)
    loop.learn(lambda group_id: 1.0 if group_id == 2 else 0.0)
    assert loop.ledger.room() == 0
    batch = loop.batch()
    assert groups(batch) == [2]
    assert (batch.sampling.filtered, batch.sampling.refilled) == (3, 2)
    assert loop.ack(batch) is Put.ACCEPTED

    loop.learn(lambda _: 1.0)
    assert loop.train() == [4, 5]
    assert loop.ledger.finished()
    assert loop.ledger.trained_groups().missed == 1


def test_a_step_without_any_group_is_skipped_and_publishes_nothing():
    loop = Loop(**FILTERED)
    loop.learn(lambda _: 0.0)
    batch = loop.batch()
    assert (batch.samples, batch.policy_version) == ((), 0)
    assert batch.sampling.skipped == "4 groups of equal rewards were filtered, 0 of 2 are left"
    assert loop.batch() == batch, "a lost answer is told again"
    assert loop.ack(batch, version=0) is Put.ACCEPTED
    assert loop.ledger.version == 0
    assert loop.ledger.trained_groups().missed == 2

    loop.learn(lambda _: 1.0)
    assert loop.train() == [4, 5]


def test_a_short_step_may_be_skipped_and_its_groups_are_carried():
    loop = Loop(**FILTERED, trains_short_batches=False)
    loop.learn(lambda group_id: 1.0 if group_id == 2 else 0.0)
    batch = loop.batch()
    assert (batch.samples, batch.sampling.carried) == ((), 1)
    assert "1 of 2 are left" in batch.sampling.skipped
    loop.ack(batch, version=0)
    loop.learn(lambda _: 1.0)
    assert loop.train() == [2, 4]


def test_a_step_is_not_skipped_while_a_group_may_still_be_scored():
    loop = Loop(**FILTERED, trains_short_batches=False)
    for _ in range(2):
        loop.submit()
        leases = loop.lease()
        loop.sample(leases[:1])
        loop.score_groups(lambda _: 0.0)
        assert loop.batch() is None
        loop.sample(leases[1:])
        loop.score_groups(lambda group_id: 1.0 if group_id == 3 else 0.0)
    assert "3 groups of equal rewards were filtered, 1 of 2 are left" in loop.batch().sampling.skipped


def test_what_a_skipped_last_step_leaves_over_is_dropped():
    loop = Loop(**FILTERED, trains_short_batches=False, total_groups=2)
    loop.learn(lambda group_id: 1.0 if group_id == 1 else 0.0)
    loop.ack(loop.batch(), version=0)
    assert loop.dropped()[-1] == (1, DropReason.SURPLUS)
    assert loop.ledger.finished()
    accounting = loop.ledger.accounting()
    assert accounting.submitted == accounting.dropped


def test_a_run_that_only_skips_is_hopeless():
    loop = Loop(**FILTERED, refill_limit=6)
    for _ in range(2):
        assert not loop.ledger.hopeless()
        loop.learn(lambda _: 0.0)
        loop.ack(loop.batch(), version=0)
    assert "zero_variance: 2 samples of reward 0" in loop.ledger.hopeless()


def test_more_groups_than_a_batch_needs_are_sampled_and_the_surplus_is_carried():
    loop = Loop(max_staleness=1, surplus_groups=1)
    assert loop.ledger.room() == 5
    loop.ready()
    batch = loop.batch()
    assert (groups(batch), batch.sampling.carried) == ([0, 1], 3)
    loop.ack(batch)
    assert loop.ledger.room() == 2
    assert loop.train() == [2, 3]


def test_surplus_that_would_be_too_old_is_dropped_with_that_reason():
    loop = Loop(surplus_groups=1)
    loop.ready()
    assert loop.train() == [0, 1]
    assert loop.dropped() == [(2, DropReason.STALE)]


def test_no_surplus_is_sampled_beyond_the_end_of_the_run():
    assert Loop(surplus_groups=1, total_groups=2).ledger.room() == 2


def test_a_resumed_run_knows_how_many_groups_its_batches_lacked():
    loop = Loop(**FILTERED, total_groups=4)
    loop.learn(lambda _: 0.0)
    loop.ack(loop.batch(), version=0)
    trained = loop.ledger.trained_groups()

    resumed = Loop(**FILTERED, total_groups=4)
    resumed.ledger.rewind(trained, 1, resumed.now)
    resumed.version = 1
    resumed.learn(lambda _: 1.0)
    assert resumed.train() == [4, 5]
    assert resumed.ledger.finished()


def test_evaluation_prompts_are_not_filtered():
    loop = Loop(**FILTERED)
    loop.ledger.submit(prompt(-1, purpose=Purpose.EVAL), loop.now)
    loop.sample(loop.lease())
    loop.score()
    assert loop.ledger.eval_results()[0].rewards == (1.0, 1.0)


def routed(tokens, segment):
    return TensorRef(segment=segment, offset=0, dtype="uint8", shape=(tokens, 2, 2))


def test_routed_experts_go_from_chunk_to_lease_to_sample_to_trainer_and_are_freed():
    """The prompt has one token: routes of as many tokens as the response has."""
    loop = Loop(max_staleness=1)
    loop.submit(2)
    first, _ = loop.lease()
    assert loop.put_chunk(first, 1, 4, routed_experts=routed(4, "chunk-routes")) is Put.ACCEPTED
    assert "chunk-routes" in loop.ledger.segments()
    loop.ledger.holder_gone("rollout/0", 1, loop.now)
    leases = loop.lease(R1)
    (chunk,) = leases[0].chunks
    assert chunk.routed_experts == routed(4, "chunk-routes")
    for lease in leases:
        for index in lease.missing:
            routes = routed(1, f"routes{lease.group.group_id}.{index}")
            assert loop.put(lease, index, R1, routed_experts=routes) is Put.ACCEPTED
    assert "chunk-routes" in loop.ledger.take_freed()
    for task in loop.tasks():
        loop.reward(task, float(task.sample_index))
    batch = loop.ledger.lease_batch(TRAINER, 0, loop.now)
    assert [sample.routed_experts.segment for sample in batch.samples] == [
        "routes0.0",
        "routes0.1",
        "routes1.0",
        "routes1.1",
    ]
    holdings = {ref.segment for _, ref in loop.ledger.holdings()}
    assert "routes1.1" in holdings, "or it could not be moved into a file"
    done = BatchTrained(lease_id=batch.lease_id, step=1, policy_version=1)
    loop.ledger.ack_batch(done, TRAINER, loop.now)
    assert {"routes0.0", "routes1.1"} <= set(loop.ledger.take_freed())


def test_a_sample_ended_by_its_deadline_has_the_routes_of_its_chunk():
    loop = Loop(on_partial_timeout=PartialPolicy.FINISH, partial_timeout_s=9.0)
    loop.submit(1)
    (lease,) = loop.lease()
    for index in lease.missing:
        loop.put_chunk(lease, index, 4, routed_experts=routed(4, f"routes{index}"))
    loop.now += 10.0
    loop.ledger.expire(loop.now)
    for task in loop.tasks():
        loop.reward(task, float(task.sample_index))
    group = loop.ledger._state.groups[0]
    assert [sample.routed_experts for sample in train_samples(group)] == [
        routed(4, "routes0"),
        routed(4, "routes1"),
    ]


@pytest.mark.parametrize("tokens", [0, 3, 5])
def test_routed_experts_of_another_length_are_refused_by_name_and_end_the_lease(tokens):
    """Truncated, or of another sample: what follows them would be trained on the wrong experts."""
    loop = Loop(max_attempts=1)
    loop.submit(1)
    (lease,) = loop.lease()
    assert loop.put_chunk(lease, 0, 4, routed_experts=routed(tokens, "wrong")) is Put.MISFIT
    assert loop.ledger.refused == {Refusal.ROUTED_EXPERTS: 1}
    assert "wrong" not in loop.ledger.segments()
    assert loop.put(lease, 1) is Put.STALE
    (again,) = loop.lease(R1)
    assert (again.missing, again.chunks) == ((0, 1), ())
    assert loop.put(again, 0, R1, routed_experts=routed(2, "wrong")) is Put.MISFIT
    (dropped,) = [each for each in loop.ledger.take_dropped() if isinstance(each, DroppedGroup)]
    assert (dropped.group_id, dropped.reason) == (0, DropReason.POISON)


# Batches in parts


def part(loop, lease_id=None, have=0, holder=TRAINER):
    return loop.ledger.lease_part(holder, loop.version, lease_id, have, loop.now)


def score_group(loop, group_id):
    """Finish and score one group; the others stay with the rollout."""
    for lease in loop.ledger.lease_prompts(R0, loop.version, 100, loop.now):
        loop.held[lease.group.group_id] = lease
    loop.sample([loop.held.pop(group_id)])
    loop.score()


def parted(**changes):
    loop = Loop(groups_per_batch=3, **changes)
    loop.held = {}
    loop.submit()
    return loop


def test_a_batch_is_lent_group_by_group_and_acknowledged_as_one():
    loop = parted()
    assert part(loop) is None
    score_group(loop, 0)
    first = part(loop)
    assert (groups(first), first.is_whole, first.groups_so_far) == ([0], False, 1)
    assert part(loop, first.lease_id, 1) is None
    score_group(loop, 1)
    score_group(loop, 2)
    rest = part(loop, first.lease_id, 1)
    assert (groups(rest), rest.is_whole, rest.lease_id) == ([1, 2], True, first.lease_id)
    assert loop.ack(rest) is Put.ACCEPTED
    assert loop.ledger.accounting().trained == 6


def test_a_part_whose_answer_was_lost_is_told_again():
    loop = parted()
    score_group(loop, 0)
    first = part(loop)
    score_group(loop, 1)
    assert part(loop).samples[: len(first.samples)] == first.samples


def test_without_staleness_no_group_is_passed_over():
    """So the gradients are summed in the same order whoever is done first."""
    loop = parted()
    score_group(loop, 1)
    assert part(loop) is None
    score_group(loop, 0)
    assert groups(part(loop)) == [0, 1]


def test_a_prompt_that_is_still_to_come_is_not_passed_over():
    loop = Loop(groups_per_batch=3)
    loop.held = {}
    loop.submit(2)
    loop.ledger.rewind(TrainedSet(extras=(0,), groups=1, samples=2), 1, 0.0)
    loop.version = 1
    while loop.ledger.room():
        loop.submit(1)
    score_group(loop, 1)
    assert groups(part(loop)) == [1]


def test_with_staleness_what_is_done_first_is_trained_first():
    loop = parted(max_staleness=1)
    score_group(loop, 2)
    score_group(loop, 4)
    assert groups(part(loop)) == [2, 4]


def test_a_part_leaves_room_for_the_groups_that_are_due():
    """Three of version 0 must be in this batch: what is newer waits, though it is complete."""
    loop = parted(max_staleness=1, total_groups=30)
    for group_id in (3, 4, 5):
        score_group(loop, group_id)
    loop.train()
    loop.submit()
    score_group(loop, 6)
    assert part(loop) is None, "0, 1 and 2 are of version 0 and fill the batch at version 1"
    score_group(loop, 1)
    assert groups(part(loop)) == [1]


def test_a_trainer_that_dies_between_parts_gets_all_of_them_again():
    loop = parted()
    score_group(loop, 0)
    first = part(loop)
    heir = Holder(TRAINER.name, TRAINER.incarnation + 1)
    again = part(loop, first.lease_id, 1, heir)
    assert groups(again) == [0]
    assert again.lease_id != first.lease_id
    assert part(loop, first.lease_id, 1) is None, "the dead one is not listened to"


def test_each_part_gives_the_lease_more_time_and_so_does_waiting():
    loop = parted(batch_lease_s=60.0, prompt_lease_s=1000.0, group_deadline_s=1000.0)
    score_group(loop, 0)
    first = part(loop)
    for _ in range(4):
        loop.now += 40.0
        assert part(loop, first.lease_id, 1) is None
        assert loop.ledger.expire(loop.now) == []
    loop.now += 61.0
    (expired,) = loop.ledger.expire(loop.now)
    assert (expired.kind, expired.group_ids) == (LeaseKind.BATCH, (0,))
    again = part(loop, first.lease_id, 1)
    assert groups(again) == [0]
    assert again.lease_id != first.lease_id


def test_a_batch_that_is_not_whole_cannot_be_acknowledged():
    loop = parted()
    score_group(loop, 0)
    assert loop.ack(part(loop)) is Put.STALE


def test_a_trainer_that_wants_whole_batches_takes_the_parts_back():
    loop = parted()
    score_group(loop, 0)
    part(loop)
    assert loop.batch() is None
    score_group(loop, 1)
    score_group(loop, 2)
    assert groups(loop.batch()) == [0, 1, 2]


def test_another_trainer_gets_no_part_of_a_batch():
    loop = parted()
    score_group(loop, 0)
    part(loop)
    assert part(loop, holder=Holder("trainer/1", 1)) is None


def test_a_batch_becomes_whole_when_nothing_more_can_come():
    loop = parted()
    score_group(loop, 0)
    first = part(loop)
    loop.ledger.end_stream(loop.now)
    for group_id in (1, 2):
        loop.ledger.reject(group_id, "too long", loop.now)
    rest = part(loop, first.lease_id, 1)
    assert (rest.samples, rest.is_whole) == ((), True)
    assert loop.ack(rest) is Put.ACCEPTED


def test_a_step_without_anything_is_skipped_in_parts_too():
    loop = Loop(filters_zero_variance=True, max_refills=0, total_groups=2)
    loop.learn(lambda _: 0.0)
    skipped = part(loop)
    assert (skipped.samples, skipped.is_whole) == ((), True)
    assert "equal rewards" in skipped.sampling.skipped


def test_a_trainer_with_half_a_batch_is_no_reason_to_sample_nothing():
    """The queue lends no prompts while memory is full and the trainer could make room: it could not."""
    loop = parted()
    score_group(loop, 0)
    first = part(loop)
    assert not loop.ledger.has_batch()
    assert "wait" in loop.ledger.waiting_on() or "run" in loop.ledger.waiting_on()
    score_group(loop, 1)
    score_group(loop, 2)
    assert loop.ledger.has_batch()
    part(loop, first.lease_id, 1)
    assert loop.ledger.has_batch()


# Puts of many


def test_a_put_of_many_rows_is_one_event():
    loop = Loop()
    loop.submit()
    loop.ledger.take_events()
    samples = [whole(lease, index) for lease in loop.lease() for index in lease.missing]
    loop.ledger.take_events()
    assert loop.ledger.put_samples(samples, R0, loop.now) == [Put.ACCEPTED] * 4
    assert len(loop.ledger.take_events()) == 1
    rewards = [reward_of(task) for task in loop.tasks()]
    loop.ledger.take_events()
    assert loop.ledger.put_rewards(rewards, SCORER, loop.now) == [Put.ACCEPTED] * 4
    assert len(loop.ledger.take_events()) == 1


def test_a_row_that_is_in_a_put_twice_is_taken_once():
    loop = Loop()
    loop.submit(1)
    (lease,) = loop.lease()
    twice = [whole(lease, 0), whole(lease, 0)]
    assert loop.ledger.put_samples(twice, R0, loop.now) == [Put.ACCEPTED, Put.DUPLICATE]
    reward = reward_of(loop.tasks()[0])
    assert loop.ledger.put_rewards([reward, reward], SCORER, loop.now) == [Put.ACCEPTED, Put.DUPLICATE]


def reward_of(task):
    return RewardReady(
        group_id=task.group_id, sample_index=task.sample_index, lease_id=task.lease_id, reward=1.0
    )


# Drops


def test_a_checkpoint_stays_small_however_many_groups_are_dropped():
    loop = Loop(total_groups=10_000, refill_limit=10_000)
    for _ in range(5_000):
        loop.ledger.reject(loop.ledger.next_group(), "too long", loop.now)
    trained = loop.ledger.trained_groups()
    assert len(msgspec.json.encode(trained)) < 300
    assert trained.dropped_before == {DropReason.REJECTED: 10_000}
    again = Loop(total_groups=10_000)
    again.ledger.rewind(trained, 1, 0.0)
    assert again.ledger.accounting().dropped == 10_000
    assert again.ledger.next_group() == 5_000


def test_what_was_dropped_stays_dropped_for_a_trainer_that_goes_further_back():
    loop = Loop()
    loop.ready(2)
    before = loop.ledger.trained_groups()
    loop.train()
    for group_id in (2, 3, 4):
        loop.ledger.reject(group_id, "too long", loop.now)
    after = loop.ledger.trained_groups()
    loop.ledger.rewind(after, 5, loop.now)
    loop.ledger.rewind(before, 6, loop.now)
    assert loop.ledger.upcoming()[:2] == (0, 1)
    assert not {2, 3, 4} & {*loop.ledger.upcoming()}
    assert loop.ledger.dropped_by_reason() == {"rejected": 6}


def test_a_checkpoint_of_another_queue_brings_its_drops():
    other = Loop()
    other.ledger.reject(0, "too long", 0.0)
    other.submit(1)
    other.ledger.reject(2, "too long", 0.0)
    trained = msgspec.json.decode(msgspec.json.encode(other.ledger.trained_groups()), type=TrainedSet)
    loop = Loop()
    loop.ledger.rewind(trained, 1, 0.0)
    assert loop.ledger.dropped_by_reason() == {"rejected": 4}
    assert loop.ledger.upcoming() == (1, 3)
    older = msgspec.structs.replace(trained, dropped_before={}, dropped=(dropped_at(0), *trained.dropped))
    loop.ledger.rewind(older, 2, 0.0)
    assert loop.ledger.dropped_by_reason() == {"rejected": 4}, "as older checkpoints say it"
    assert dropped_at(1).group_id not in loop.ledger._state.drops


def dropped_at(group_id):
    return DroppedPosition(group_id=group_id, samples=2, reason=DropReason.REJECTED)
