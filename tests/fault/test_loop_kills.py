"""The death of anything but the trainer, at every step of a group's life, changes nothing it trains on."""

import pytest
from loop_run import (
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_trained_in_order,
    assert_trainer_went_on,
    kills,
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

SLOW_TOKENS = {"scripted_token_s": 0.02}


def assert_nothing_was_lost(run, plan):
    assert sorted(run.killed) == sorted(fault.actor for fault in plan), run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)


def test_every_group_is_trained_on_exactly_once_wherever_its_rollout_dies(run_loop):
    """I2, I3, I4, I5, I7, I8: both rollouts are killed at every point of a group's life."""
    plan = [
        *kills("rollout/0", "leased", "first_token", "tensors_written", "ready_sent", "install_bucket"),
        *kills("rollout/1", "install_bucket", ("ready_sent", 2), ("tensors_written", 2), ("first_token", 3)),
    ]
    run = run_loop.until_killed(plan, rollout=SLOW_TOKENS)
    assert_nothing_was_lost(run, plan)
    assert_active_at_the_end(run, "rollout/0")
    assert_active_at_the_end(run, "rollout/1")


def test_the_only_rollout_may_die_while_it_installs_and_while_it_samples(run_loop):
    """I2, I5: with one replica of one, the trainer waits and goes on."""
    plan = kills("rollout/0", ("install_bucket", 2), ("leased", 3), ("ready_sent", 3))
    run = run_loop.until_killed(plan, rollout={"replicas": 1})
    assert_nothing_was_lost(run, plan)
    assert_active_at_the_end(run, "rollout/0")


def test_every_group_is_trained_on_exactly_once_wherever_its_reward_actor_dies(run_loop):
    """I2, I5, I8: and its worker processes die with it."""
    plan = kills("reward", "rewarding", "reward_sent", ("rewarding", 5), ("reward_sent", 2))
    run = run_loop.until_killed(plan, rollout=SLOW_TOKENS)
    assert_nothing_was_lost(run, plan)


def test_every_group_is_trained_on_exactly_once_wherever_the_queue_dies(run_loop):
    """I2, I5, I8: before it writes down, after it has, and after it has told."""
    plan = kills(
        "queue",
        ("queue_decided", 3),
        ("queue_committed", 7),
        ("queue_decided", 11),
        ("queue_answered", 9),
        ("queue_committed", 2),
        ("queue_decided", 5),
    )
    run = run_loop.until_killed(plan, rollout=SLOW_TOKENS)
    assert_nothing_was_lost(run, plan)


def test_prompts_are_neither_lost_nor_repeated_when_their_actor_or_the_queue_dies(run_loop):
    """I2, I5: evaluation prompts included, of which every round is reported whole."""
    rows = run_loop.config().data.path
    plan = kills(
        "prompts", "prompts_written", ("prompts_written", 2), "prompts_written", ("prompts_written", 3)
    )
    plan += kills("queue", ("queue_decided", 2), ("queue_committed", 12), ("queue_decided", 15))
    run = run_loop(
        plan=plan,
        eval={"path": rows, "every": 2, "samples_per_prompt": 1, "max_prompts": 3},
        rollout=SLOW_TOKENS,
    )
    assert_nothing_was_lost(run, plan)
    assert {event["step"] for event in run.of("eval")} == {0, 2, 4, 5}
    assert all(event["samples"] == 3 for event in run.of("eval"))
