"""Whatever happens in whatever order, the ledger keeps its promises and the run can be finished."""

import itertools
import math
import os
import random
from collections import Counter

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from queue_rows import chunk_of, ref, sample_of

from relax_actor.ids import Holder
from relax_actor.protocol import (
    BatchTrained,
    PromptGroup,
    Purpose,
    RewardReady,
)
from relax_actor.transfer_queue.events import GroupDropped, decode_events, encode_events
from relax_actor.transfer_queue.ledger import Ledger, LedgerConfig
from relax_actor.transfer_queue.ledger.groups import RowState
from relax_actor.transfer_queue.records import DropReason, Put, TrainedSet
from relax_actor.transfer_queue.rules import PartialPolicy

ROLLOUTS, REWARDERS = ("rollout/0", "rollout/1"), ("reward/0", "reward/1")
names = st.sampled_from([*ROLLOUTS, *REWARDERS, "trainer/0"])


class World(RuleBasedStateMachine):
    """Actors that work, die, repeat themselves, come late or go silent, around one ledger."""

    samples_put = Bundle("samples_put")
    rewards_put = Bundle("rewards_put")
    acks = Bundle("acks")

    @initialize(
        staleness=st.integers(0, 2),
        per_batch=st.integers(1, 3),
        samples=st.integers(1, 3),
        steps=st.integers(1, 4),
        min_valid=st.integers(1, 2),
        attempts=st.integers(0, 3),
        on_timeout=st.sampled_from(PartialPolicy),
        filters=st.booleans(),
        surplus=st.integers(0, 2),
        max_refills=st.integers(0, 2),
        trains_short=st.booleans(),
    )
    def begin(self, *, staleness, per_batch, samples, steps, min_valid, attempts, **limits):
        self.start(
            LedgerConfig(
                groups_per_batch=per_batch,
                samples_per_prompt=samples,
                max_staleness=staleness,
                total_groups=per_batch * steps,
                min_valid_samples=min_valid,
                max_attempts=attempts,
                prompt_lease_s=30.0,
                reward_lease_s=20.0,
                batch_lease_s=60.0,
                group_deadline_s=100.0,
                partial_timeout_s=50.0,
                on_partial_timeout=limits.get("on_timeout", PartialPolicy.WAIT),
                filters_zero_variance=limits.get("filters", False),
                surplus_groups=limits.get("surplus", 0),
                max_refills=limits.get("max_refills", 0),
                trains_short_batches=limits.get("trains_short", True),
            )
        )

    def start(self, config):
        self.config = config
        self.ledger = Ledger(self.config)
        self.events = []
        self.now = 100.0
        self.version = 0
        self.checkpoint = TrainedSet()
        self.trained = Counter()  # groups, since the beginning or the last rewind's checkpoint
        self.checkpoint_trained = Counter()
        self.incarnation = Counter()
        self.prompt_leases, self.reward_tasks = {}, {}
        self.missed = self.checkpoint_missed = 0  # groups by which batches were short
        self.chunks = {}  # by sample: what the next lease has to carry
        self.begun = {}  # by lease and sample: the version of the first token
        self.batch = None
        self.parts_lease, self.parts = None, []  # groups of a batch that is not whole yet
        self.next_eval = -1
        self.evals, self.eval_results = set(), Counter()
        self.dropped = set()  # positions, for good
        self.live = Counter()  # arrays by segment, as a model of what is needed
        self.freed = set()
        self.segments = 0
        self.stale_allowed = config.surplus_groups > 0
        self.ledger.published(0, self.now)

    # Who does what

    def holder(self, name):
        return Holder(name, self.incarnation[name] + 1)

    @rule(count=st.integers(1, 9))
    def prompts_come(self, count):
        for _ in range(min(count, self.ledger.room())):
            self.submit()

    def submit(self):
        group_id = self.ledger.next_group()
        prompt = PromptGroup(
            group_id=group_id,
            tokens=ref(self.segment("p")),
            samples=self.config.samples_per_prompt,
            label="4",
            origin=f"data.jsonl:{group_id + 1}",
        )
        assert self.ledger.submit(prompt, self.now)
        assert not self.ledger.submit(prompt, self.now)

    @rule()
    def a_prompt_is_rejected(self):
        assert self.ledger.reject(self.ledger.next_group(), "too long", self.now)

    @rule()
    def an_eval_prompt_comes(self):
        prompt = PromptGroup(
            group_id=self.next_eval,
            tokens=ref(self.segment("e")),
            samples=2,
            label="",
            origin="eval.jsonl:1",
            purpose=Purpose.EVAL,
            eval_set="held_out",
        )
        self.evals.add(self.next_eval)
        self.next_eval -= 1
        assert self.ledger.submit(prompt, self.now)

    @rule(
        name=st.sampled_from(ROLLOUTS),
        slots=st.integers(1, 5),
        lag=st.sampled_from([0, 0, 0, 1]),
        room_of_other=st.integers(0, 5),
    )
    def a_rollout_takes_prompts(self, name, slots, lag, room_of_other=0):
        holder = self.holder(name)
        others = {self.holder(each): room_of_other for each in ROLLOUTS if each != name and room_of_other}
        leases = self.ledger.lease_prompts(holder, self.version - lag, slots, self.now, others)
        assert not (lag and leases), "I4: only the newest version gets prompts"
        assert sum(len(lease.missing) for lease in leases) <= slots
        for lease in leases:
            assert lease.missing
            self.check_chunks(lease)
            self.prompt_leases[lease.lease_id] = (lease, holder, set(lease.missing))

    def check_chunks(self, lease):
        carried = {each.sample_index: each for each in lease.chunks}
        known = {i: self.chunks[lease.group.group_id, i] for i in lease.missing if self.has_chunk(lease, i)}
        assert carried == known, "what was accepted last is gone on from"
        for index, each in carried.items():
            self.begun[lease.lease_id, index] = each.oldest_version

    def has_chunk(self, lease, index):
        return (lease.group.group_id, index) in self.chunks

    @precondition(lambda self: self.prompt_leases)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def a_rollout_puts_a_chunk(self, data, tokens):
        lease, holder, missing = self.prompt_leases[data.draw(st.sampled_from(sorted(self.prompt_leases)))]
        self.put_chunk(lease, holder, data.draw(st.sampled_from(sorted(missing))), tokens)

    def put_chunk(self, lease, holder, index, tokens):
        tensor = ref(self.segment("c"), tokens)
        oldest = self.begun.setdefault((lease.lease_id, index), lease.policy_version)
        put = chunk_of(lease, index, tensor, oldest_version=oldest, newest_version=self.version)
        if self.ledger.put_chunk(put, holder, self.now) is Put.ACCEPTED:
            before = self.chunks.get((lease.group.group_id, index))
            assert before is None or before.length < tokens
            self.chunks[lease.group.group_id, index] = put

    @precondition(lambda self: self.prompt_leases)
    @rule(target=samples_put, data=st.data(), newer=st.booleans())
    def a_rollout_finishes_a_sample(self, data, newer):
        lease, holder, missing = self.prompt_leases[data.draw(st.sampled_from(sorted(self.prompt_leases)))]
        index = data.draw(st.sampled_from(sorted(missing)))
        return self.put_sample(lease, holder, index, newer=newer)

    def put_sample(self, lease, holder, index, *, newer=False):
        tokens = ref(self.segment("s"))
        begins = max(lease.policy_version, self.version) if newer else lease.policy_version
        oldest = self.begun.get((lease.lease_id, index), begins)
        put = sample_of(lease, index, tokens, oldest_version=oldest, newest_version=self.version)
        if self.ledger.put_samples([put], holder, self.now)[0] is Put.ACCEPTED:
            self.chunks.pop((lease.group.group_id, index), None)
        _, _, missing = self.prompt_leases[lease.lease_id]
        missing.discard(index)
        if not missing:
            del self.prompt_leases[lease.lease_id]
        return put, holder

    @precondition(lambda self: self.prompt_leases)
    @rule(data=st.data())
    def a_lease_is_finished_and_scored(self, data):
        lease, holder, missing = self.prompt_leases[data.draw(st.sampled_from(sorted(self.prompt_leases)))]
        for index in sorted(missing):
            self.put_sample(lease, holder, index)
        self.a_reward_actor_takes_samples("reward/1", 9)
        for key in sorted(self.reward_tasks):
            self.score(key, 1.0)

    @rule(put=samples_put)
    def a_sample_is_put_twice(self, put):
        assert self.ledger.put_samples([put[0]], put[1], self.now)[0] in (Put.DUPLICATE, Put.STALE)

    @rule(name=st.sampled_from(REWARDERS), rows=st.integers(1, 5))
    def a_reward_actor_takes_samples(self, name, rows):
        for task in self.ledger.lease_rewards(self.holder(name), rows, self.now):
            self.reward_tasks[task.lease_id, task.group_id, task.sample_index] = (task, self.holder(name))

    @precondition(lambda self: self.reward_tasks)
    @rule(
        target=rewards_put,
        data=st.data(),
        reward=st.sampled_from([1.0, 0.0, 0.5, 1.0, None, math.nan]),
    )
    def a_reward_actor_scores(self, data, reward):
        return self.score(data.draw(st.sampled_from(sorted(self.reward_tasks))), reward)

    def score(self, key, reward):
        task, holder = self.reward_tasks.pop(key)
        ready = RewardReady(
            group_id=task.group_id,
            sample_index=task.sample_index,
            lease_id=task.lease_id,
            reward=reward,
            reason="ValueError" if reward is None else "",
        )
        self.ledger.put_rewards([ready], holder, self.now)
        return ready, holder

    @rule(put=rewards_put)
    def a_reward_is_put_twice(self, put):
        assert self.ledger.put_rewards([put[0]], put[1], self.now)[0] in (Put.DUPLICATE, Put.STALE)

    @rule()
    def the_trainer_takes_a_batch(self):
        batch = self.ledger.lease_batch(self.holder("trainer/0"), self.version, self.now)
        if batch is None:
            return
        again = self.ledger.lease_batch(self.holder("trainer/0"), self.version, self.now)
        assert batch == again, "a lost answer is told again"
        self.batch = (batch, self.holder("trainer/0"))
        self.check_batch(batch)

    @rule()
    def the_trainer_takes_a_part(self):
        holder, had = self.holder("trainer/0"), (self.parts_lease, len(self.parts))
        part = self.ledger.lease_part(holder, self.version, *had, self.now)
        if part is None:
            return
        again = self.ledger.lease_part(holder, self.version, *had, self.now)
        assert again.samples[: len(part.samples)] == part.samples, "a lost answer is told again"
        if part.lease_id != self.parts_lease:
            self.parts_lease, self.parts = part.lease_id, []
        for sample in again.samples:
            if not self.parts or self.parts[-1][0].group_id != sample.group_id:
                self.parts.append([])
            self.parts[-1].append(sample)
        assert again.groups_so_far == len(self.parts)
        if again.is_whole:
            whole = msgspec.structs.replace(again, samples=tuple(itertools.chain(*self.parts)))
            self.batch = (whole, holder)
            self.check_batch(whole, in_parts=True)

    def check_batch(self, batch, *, in_parts=False):
        keys = [(sample.group_id, sample.sample_index) for sample in batch.samples]
        assert len(keys) == len(set(keys))
        assert keys == sorted(keys) or (in_parts and not self.config.is_in_order)
        assert all(sample.group_id >= 0 and math.isfinite(sample.reward) for sample in batch.samples)
        assert all(
            self.version - sample.oldest_version <= self.config.max_staleness for sample in batch.samples
        ), "I3"
        groups = {sample.group_id for sample in batch.samples}
        self.check_size(batch, len(groups))
        if self.config.max_staleness == 0 and not self.config.surplus_groups and groups:
            self.drain()
            done = {*self.trained, *self.dropped}
            expected = [p for p in range(len(done) + len(groups) + 1) if p not in done]
            assert sorted(groups) == expected[: len(groups)], "0 is synchronous: batches are in order"

    def check_size(self, batch, groups):
        """Only where groups were filtered, and replaced so often, a batch is short or empty."""
        rewards = {}
        for sample in batch.samples:
            rewards.setdefault(sample.group_id, []).append(sample.reward)
        if self.config.filters_zero_variance:
            assert all(len(set(each)) > 1 for each in rewards.values())
        assert bool(batch.sampling.skipped) == (groups == 0)
        if groups < self.config.groups_per_batch:
            assert batch.sampling.filtered > self.config.max_filtered
            assert groups == 0 or (self.config.trains_short_batches and batch.sampling.carried == 0)

    @rule(in_parts=st.booleans())
    def the_trainer_steps(self, in_parts):
        self.the_trainer_takes_a_part() if in_parts else self.the_trainer_takes_a_batch()
        if self.batch:
            self.the_trainer_trains()

    @precondition(lambda self: self.batch)
    @rule(target=acks)
    def the_trainer_trains(self):
        (batch, holder), self.batch = self.batch, None
        version = self.version + bool(batch.samples)  # nothing is published when nothing was learnt
        trained = BatchTrained(lease_id=batch.lease_id, step=1, policy_version=version)
        put = self.ledger.ack_batch(trained, holder, self.now)
        if put is Put.ACCEPTED:
            self.version = version
            groups = {sample.group_id for sample in batch.samples}
            self.trained.update(groups)
            self.missed += self.config.groups_per_batch - len(groups)
        return trained, holder

    @rule(ack=acks)
    def an_ack_comes_twice(self, ack):
        assert self.ledger.ack_batch(*ack, self.now) in (Put.DUPLICATE, Put.STALE)

    @rule()
    def the_trainer_saves(self):
        self.checkpoint, self.checkpoint_trained = self.ledger.trained_groups(), Counter(self.trained)
        self.checkpoint_missed = self.missed

    @rule(jump=st.integers(1, 3), dies=st.booleans())
    def the_trainer_goes_back(self, jump, dies):
        if dies:
            self.ledger.holder_gone("trainer/0", self.incarnation["trainer/0"] + 1, self.now)
            self.incarnation["trainer/0"] += 1
        self.version += jump
        self.ledger.rewind(self.checkpoint, self.version, self.now)
        self.trained, self.missed = Counter(self.checkpoint_trained), self.checkpoint_missed
        self.batch = None
        self.chunks.clear()
        assert self.ledger.trained_groups().samples == self.checkpoint.samples

    @rule(name=names, told=st.booleans())
    def an_actor_dies(self, name, told):
        if told:
            self.ledger.holder_gone(name, self.incarnation[name] + 1, self.now)
        self.incarnation[name] += 1

    @rule(name=names)
    def a_death_is_told_late(self, name):
        self.ledger.holder_gone(name, self.incarnation[name], self.now)

    @rule(seconds=st.sampled_from([1.0, 15.0, 35.0, 60.0, 120.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)
        deadline = self.ledger.next_deadline()
        assert deadline is None or deadline > self.now

    @rule()
    def the_version_jumps(self):
        self.version += 1
        self.stale_allowed = True
        assert self.ledger.published(self.version, self.now)
        assert not self.ledger.published(self.version - 1, self.now)

    @rule()
    def a_holder_meets_a_restarted_queue(self):
        holder = self.holder("rollout/0")
        kept = [lease_id for lease_id, (_, h, _) in self.prompt_leases.items() if h == holder]
        self.ledger.retain(holder, kept[::2], self.now)

    @rule()
    def the_queue_restarts(self):
        self.drain()
        again = Ledger.replay(self.config, self.events)
        assert again._state == self.ledger._state
        self.ledger = again

    @rule()
    def results_are_read(self):
        for result in self.ledger.eval_results():
            self.eval_results[result.group_id] += 1

    # What always holds

    @invariant()
    def every_sample_is_accounted_for(self):
        accounting = self.ledger.accounting()
        assert accounting.balances, accounting
        assert min(accounting.running, accounting.queued, accounting.dropped, accounting.trained) >= 0
        assert sum(self.ledger.dropped_by_reason().values()) == accounting.dropped
        groups = self.ledger._state.groups.values()
        for group in groups:
            assert group.counts == [sum(row.state is state for row in group.rows) for state in RowState]
        counted = [sum(g.count(state) for g in groups if g.is_train) for state in RowState]
        assert counted == self.ledger._state.rows

    @invariant()
    def a_group_is_trained_once(self):
        assert not self.trained or max(self.trained.values()) == 1
        assert self.ledger.trained_groups().groups == len(self.trained)
        assert not self.dropped & self.trained.keys()
        assert len(self.trained) + self.missed <= self.config.total_groups
        assert self.ledger.trained_groups().missed == self.missed

    @invariant()
    def only_the_window_is_outstanding(self):
        assert self.ledger._state.train_groups <= self.config.window

    @invariant()
    def nothing_is_stale_unless_a_version_was_skipped(self):
        stale = self.ledger.dropped_by_reason().get(DropReason.STALE, 0)
        assert self.stale_allowed or not stale

    @invariant()
    def segments_live_as_long_as_they_are_needed(self):
        needed = {
            tensor.segment
            for group in self.ledger._state.groups.values()
            for tensor in (group.prompt.tokens, *(r for row in group.rows for r in row.refs))
        }
        assert needed == self.ledger.segments()
        freed = self.ledger.take_freed()
        assert len(freed) == len(set(freed))
        assert not self.freed & set(freed)
        self.freed |= set(freed)
        assert not self.freed & needed

    @invariant()
    def an_eval_is_reported_once(self):
        assert not self.eval_results or max(self.eval_results.values()) == 1

    @invariant()
    def it_can_say_what_it_waits_for(self):
        assert self.ledger.waiting_on()
        self.drain()

    def drain(self):
        events = self.ledger.take_events()
        assert decode_events(encode_events(events)) == events
        self.events += events
        dropped = [each.group.group_id for each in events if isinstance(each, GroupDropped)]
        dropped = [group_id for group_id in dropped if group_id >= 0]
        assert not self.dropped & {*dropped}, "what was dropped stays dropped"
        self.dropped |= {*dropped}

    def segment(self, kind):
        self.segments += 1
        return f"{kind}{self.segments}"

    def teardown(self):
        """With everybody alive and at work, the run comes to its end."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(400):
            if self.ledger.finished() and not self.ledger.open_evals:
                break
            self.everybody_works()
        assert self.ledger.finished(), self.ledger.waiting_on()
        assert len(self.trained) + self.missed == self.config.total_groups
        accounting = self.ledger.accounting()
        assert accounting.submitted == accounting.trained + accounting.dropped
        self.results_are_read()
        assert set(self.eval_results) == self.evals
        self.every_sample_is_accounted_for()
        self.segments_live_as_long_as_they_are_needed()
        assert not self.ledger.segments(), "nothing is left behind"

    def everybody_works(self):
        self.time_passes(1.0)
        self.prompts_come(4)
        for name in ROLLOUTS:
            for lease in self.ledger.lease_prompts(self.holder(name), self.version, 3, self.now):
                self.check_chunks(lease)
                self.prompt_leases[lease.lease_id] = (lease, self.holder(name), set(lease.missing))
        for lease, holder, missing in list(self.prompt_leases.values()):
            for index in sorted(missing):
                self.put_sample(lease, holder, index)
        for name in REWARDERS:
            self.a_reward_actor_takes_samples(name, 5)
        for key in sorted(self.reward_tasks):
            self.score(key, 1.0 if key[2] else 0.0)
        self.the_trainer_steps(in_parts=self.config.samples_per_prompt != 2)
        self.results_are_read()


World.TestCase.settings = settings(
    max_examples=int(os.environ.get("RELAX_ACTOR_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_the_ledger_keeps_its_promises = World.TestCase


@pytest.mark.parametrize("seed", range(30))
def test_a_long_run_with_few_mishaps_ends_and_drops_nothing_as_stale(seed):
    """The same world, but with chances as in life: samples are slow and out of order, deaths are rare."""
    rng = random.Random(seed)
    world = World()
    world.begin(
        staleness=rng.randint(0, 3),
        per_batch=rng.randint(1, 4),
        samples=rng.randint(1, 3),
        steps=rng.randint(4, 12),
        min_valid=1,
        attempts=5,
    )
    moves = [
        (10, lambda: world.prompts_come(rng.randint(1, 9))),
        (15, lambda: take_prompts(world, rng)),
        (25, lambda: finish_a_sample(world, rng)),
        (15, lambda: put_a_chunk(world, rng)),
        (15, lambda: world.a_reward_actor_takes_samples(rng.choice(REWARDERS), rng.randint(1, 5))),
        (25, lambda: score_a_sample(world, rng)),
        (15, lambda: world.the_trainer_steps(in_parts=bool(seed % 2))),
        (3, lambda: world.time_passes(1.0)),
        (0.5, lambda: world.an_actor_dies(rng.choice([*ROLLOUTS, *REWARDERS]), told=True)),
        (0.2, world.a_prompt_is_rejected),
        (0.5, world.an_eval_prompt_comes),
        (1.0, world.the_trainer_saves),
        (0.1, lambda: world.the_trainer_goes_back(jump=1, dies=True)),
        (0.1, world.the_queue_restarts),
    ]
    for _ in range(600):
        rng.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()
        check(world)
    world.teardown()
    assert DropReason.STALE not in world.ledger.dropped_by_reason()


def take_prompts(world, rng):
    world.a_rollout_takes_prompts(rng.choice(ROLLOUTS), rng.randint(1, 9), lag=0)


def finish_a_sample(world, rng):
    if world.prompt_leases:
        lease, holder, missing = world.prompt_leases[rng.choice(sorted(world.prompt_leases))]
        world.put_sample(lease, holder, rng.choice(sorted(missing)))


def put_a_chunk(world, rng):
    if world.prompt_leases:
        lease, holder, missing = world.prompt_leases[rng.choice(sorted(world.prompt_leases))]
        world.put_chunk(lease, holder, rng.choice(sorted(missing)), rng.randint(1, 9))


def score_a_sample(world, rng):
    if world.reward_tasks:
        world.score(rng.choice(sorted(world.reward_tasks)), rng.choice([1.0, 0.0, 0.5, 1.0, None, 1.0]))


def check(world):
    world.every_sample_is_accounted_for()
    world.a_group_is_trained_once()
    world.only_the_window_is_outstanding()
    world.nothing_is_stale_unless_a_version_was_skipped()
    world.segments_live_as_long_as_they_are_needed()
    world.it_can_say_what_it_waits_for()
