"""Dynamic sampling in whole runs: what teaches nothing is filtered, replaced, and in the end skipped."""

import pytest
from loop_run import GROUPS_PER_STEP, assert_kept_its_promises

pytestmark = pytest.mark.timeout(180)

FILTER = {"filter_groups": "zero_variance"}


def dropped_for(run, reason):
    return {event["group_id"] for event in run.of("group_dropped", reason=reason)}


def test_groups_of_equal_rewards_are_replaced_so_that_every_step_has_its_batch(run_loop):
    run = run_loop(rollout={"samples_per_prompt": 2}, train=FILTER | {"global_batch_size": 8})

    assert_kept_its_promises(run)
    filtered = dropped_for(run, "zero_variance")
    assert filtered
    assert not filtered & set(run.trained)
    assert set(run.trained) | filtered >= set(range(max(run.trained))), "every prompt is accounted for"
    steps = run.history
    assert all(len(step["groups"]) == GROUPS_PER_STEP for step in steps if step["groups_filtered"] < 12)
    assert 0 < sum(step["groups_filtered"] for step in steps) <= len(filtered)
    assert all(not step["skipped"] for step in steps)


def test_a_run_without_signal_skips_its_steps_with_a_reason_and_ends_in_order(run_loop):
    run = run_loop(
        run={"steps": 3}, reward={"function": "user_rewards:equal"}, train=FILTER, queue={"max_refills": 1}
    )

    assert run.outcome.exit_code == 0, run.log
    assert [step["step"] for step in run.history] == [1, 2, 3]
    assert all("groups of equal rewards were filtered" in step["skipped"] for step in run.history)
    assert all(step["groups_refilled"] == GROUPS_PER_STEP for step in run.history)
    assert [event["version"] for event in run.of("policy_published")] == [0]
    assert run.of("ledger")[-1]["balances"]


def test_over_sampled_groups_are_carried_to_the_next_step(run_loop):
    run = run_loop(train=FILTER, queue={"over_sampling": 1.5})

    assert_kept_its_promises(run)
    assert any(step["groups_carried"] for step in run.history)
    accounted = set(run.trained) | dropped_for(run, "zero_variance") | dropped_for(run, "stale")
    left = set(range(max(run.trained))) - accounted  # of those beyond a batch that were slower than others
    assert len(left) <= run.config.staleness_window - GROUPS_PER_STEP, left
