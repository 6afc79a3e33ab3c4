"""Wherever the trainer dies, it goes on from its newest checkpoint, under a higher version."""

import pytest
from loop_run import (
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_trained_in_order,
    kills,
)

from relax_actor.faults import Action, Fault

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]


def assert_each_life_began_at_a_checkpoint(run):
    """Check that an incarnation's steps follow the newest checkpoint before it; 0 is the model."""
    for spawned in run.of("child_spawned", child="trainer"):
        begun = [event["step"] for event in run.of("checkpoint_loaded", inc=spawned["incarnation"])] or [0]
        saved = [event["step"] for event in run.of("checkpoint_saved") if event["m"] < spawned["m"]]
        assert begun[0] >= max(saved, default=0)  # later, if it died before it said so
        steps = [event["step"] for event in run.of("step", inc=spawned["incarnation"])]
        assert steps == list(range(begun[0] + 1, begun[0] + 1 + len(steps)))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_killed_trainer_goes_on_from_its_newest_checkpoint(run_loop, staleness):
    """I2, I3, I7, I8: each prompt once in the history that leads to the final weights."""
    plan = kills(
        "trainer",
        "batch_leased",
        ("trained", 2),
        ("publish_bucket", 2),
        ("publish_latest", 2),
        ("acknowledged", 3),
        ("checkpoint_file", 1),
        "checkpoint_manifest",
        "checkpoint_rename",
    )
    run = run_loop(plan=plan, run={"max_staleness": staleness, "steps": 6}, train={"checkpoint_every": 2})
    assert run.killed == ["trainer"] * len(plan), run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_each_life_began_at_a_checkpoint(run)
    for rollout in ("rollout/0", "rollout/1"):
        assert len(run.of("child_spawned", child=rollout)) == 1
        assert_active_at_the_end(run, rollout)


def test_a_trainer_whose_batch_was_taken_back_returns_to_its_checkpoint(run_loop):
    """I2, I9: it trained on samples that were not its own any more, so those weights never count."""
    slow = Fault(actor="trainer", point="trained", nth=2, action=Action.DELAY, seconds=8.0)
    run = run_loop(plan=[slow], train={"lease_s": 4.0, "checkpoint_every": 1})
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    *late, done = run.of("child_exited", child="trainer")
    assert late, run.log
    assert all("lease" in event["line"] for event in late), run.log
    assert done["exit"] == "normal", run.log
