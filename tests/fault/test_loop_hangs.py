"""An actor that hangs is alive: its lease ends, and what it says when it wakes is refused."""

import os
import signal

import pytest
from loop_run import (
    ENDLESS_STEPS,
    assert_kept_its_promises,
    assert_trained_in_order,
    assert_trainer_went_on,
)

from relax_actor.app import RunControl
from relax_actor.faults import Action, Fault
from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]


class Waker:
    """Continues a stopped actor once another has been given its work."""

    def __init__(self, actor):
        self.actor, self.woken = actor, False

    def __call__(self, folder):
        events, _ = read_events(folder / "events.jsonl")
        expired = [event for event in events if event["kind"] == "lease_expired"]
        spawned = [
            event for event in events if event["kind"] == "child_spawned" and event["child"] == self.actor
        ]
        trained = [event for event in events if event["kind"] == "step"]
        if expired and not self.woken and any(step["m"] > expired[0]["m"] for step in trained):
            os.kill(spawned[-1]["pid"], signal.SIGCONT)
            self.woken = True


class UntilRefused:
    """Stops the run once the queue has refused what a sender said.

    Args:
        sender: who.
        inner: called before.
        control: of the run.
    """

    def __init__(self, sender, inner, control):
        self._sender, self._inner, self._control = sender, inner, control

    def __call__(self, folder):
        self._inner(folder)
        events, _ = read_events(folder / "events.jsonl")
        if any(each["kind"] == "put_refused" and each["sender"] == self._sender for each in events):
            self._control.stop("SIGTERM")


@pytest.mark.parametrize("point", ["first_token", "tensors_written"])
def test_another_rollout_does_the_work_of_one_that_hangs(run_loop, point):
    """I7, I9: its group is sampled elsewhere, and the sleeper's samples are refused as stale."""
    waker, control = Waker("rollout/0"), RunControl()
    run = run_loop(
        plan=[Fault(actor="rollout/0", point=point, nth=2, action=Action.STOP)],
        run={"steps": ENDLESS_STEPS},
        rollout={"lease_s": 3.0, "scripted_token_s": 0.03},
        control=control,
        on_tick=UntilRefused("rollout/0", waker, control),
    )
    assert waker.woken, run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    late = run.of("lease_expired")
    assert [event["holder"] for event in late] == [{"name": "rollout/0", "incarnation": 1}] * len(late)
    assert len(run.of("child_spawned", child="rollout/0")) == 1
    assert sum(event["stale"] for event in run.of("put_refused", sender="rollout/0")) > 0, run.log


def test_a_reward_actor_that_hangs_keeps_nobody_waiting(run_loop):
    """I9: what it holds goes to the other one."""
    waker = Waker("reward/0")
    run = run_loop(
        plan=[Fault(actor="reward/0", point="rewarding", nth=3, action=Action.STOP)],
        run={"steps": 6},
        reward={"replicas": 2, "lease_s": 3.0},
        on_tick=waker,
    )
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert run.of("lease_expired"), run.log
