"""An actor that hangs is alive: its lease ends, and what it says when it wakes is refused."""

import os
import signal
import time

import psutil
import pytest
from loop_run import assert_kept_its_promises, assert_trained_in_order, assert_trainer_went_on

from relax_actor.faults import Action, Fault
from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]


class Waker:
    """Continues a stopped actor once another has been given its work."""

    def __init__(self, actor):
        self.actor, self.woken_at = actor, 0.0

    def __call__(self, folder):
        events, _ = read_events(folder / "events.jsonl")
        (pid,) = {event["pid"] for event in events if is_spawn_of(self.actor, event)} or (0,)
        if self.woken_at or not pid or psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            return
        silent_since = max((event["m"] for event in events if event["actor"] == self.actor), default=0.0)
        expired = [event["m"] for event in expiries(events, self.actor) if event["m"] > silent_since]
        trained = [event["m"] for event in events if event["kind"] == "step"]
        if expired and trained and trained[-1] > expired[0]:
            self.woken_at = time.monotonic()
            os.kill(pid, signal.SIGCONT)


def is_spawn_of(actor, event):
    return event["kind"] == "child_spawned" and event["child"] == actor


def expiries(events, actor):
    """Return the ends of leases of an actor's first incarnation."""
    holder = {"name": actor, "incarnation": 1}
    return [event for event in events if event["kind"] == "lease_expired" and event["holder"] == holder]


@pytest.mark.parametrize("point", ["first_token", "tensors_written"])
def test_another_rollout_does_the_work_of_one_that_hangs(run_loop, point):
    """I7, I9: its group is sampled elsewhere, and the sleeper's samples are refused as stale."""
    waker = Waker("rollout/0")

    def is_refused(events):
        refused = [event for event in events if event["kind"] == "put_refused" and waker.woken_at]
        return any(event["sender"] == "rollout/0" and event["m"] > waker.woken_at for event in refused)

    run = run_loop.until(
        is_refused,
        more_steps=0,
        plan=[Fault(actor="rollout/0", point=point, nth=2, action=Action.STOP)],
        rollout={"lease_s": 4.0, "scripted_token_s": 0.03},
        on_tick=waker,
    )
    assert waker.woken_at, run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert expiries(run.events, "rollout/0")
    assert len(run.of("child_spawned", child="rollout/0")) == 1
    assert sum(event["stale"] for event in run.of("put_refused", sender="rollout/0")) > 0, run.log


def test_a_reward_actor_that_hangs_keeps_nobody_waiting(run_loop):
    """I9: what it holds goes to the other one."""
    waker = Waker("reward/0")
    run = run_loop.until(
        lambda _events: waker.woken_at,
        plan=[Fault(actor="reward/0", point="rewarding", nth=3, action=Action.STOP)],
        reward={"replicas": 2, "lease_s": 3.0},
        on_tick=waker,
    )
    assert waker.woken_at, run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert expiries(run.events, "reward/0"), run.log
