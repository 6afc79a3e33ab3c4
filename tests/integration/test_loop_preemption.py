"""A run that is told to make room: it keeps a checkpoint, and goes on from there; no step is done twice."""

import os
import signal
import threading

import pytest
from loop_faults import stopped_trainer
from loop_run import (
    ENDLESS_STEPS,
    assert_kept_its_promises,
    assert_nothing_is_left,
    assert_trained_in_order,
    kills,
)

from relax_actor.app import RunControl
from relax_actor.faults import Action, Fault
from relax_actor.telemetry import read_events
from relax_actor.trainers.checkpoint import CheckpointStore

pytestmark = pytest.mark.timeout(180)


def after_steps(count, action):
    """Return a tick that acts once a run has done so many steps."""
    done = threading.Event()

    def tick(folder):
        events, _ = read_events(folder / "events.jsonl")
        if not done.is_set() and sum(event["kind"] == "step" for event in events) >= count:
            done.set()
            action()

    return tick


def test_a_preempted_run_goes_on_with_the_next_step(run_loop, tmp_path):
    folder, control = tmp_path / "run", RunControl()
    tick = after_steps(2, lambda: control.preempt("SIGUSR2"))
    first = run_loop(folder=folder, control=control, on_tick=tick, run={"steps": ENDLESS_STEPS})
    assert (first.outcome.exit_code, first.outcome.reason) == (140, "preempted: SIGUSR2"), first.log
    assert_nothing_is_left(first)
    newest = CheckpointStore(folder / "checkpoints").latest()
    last = first.of("step")[-1]["step"]
    assert newest.step == last
    again = run_loop(folder=folder, resume=newest.path, run={"steps": last + 2})
    assert again.outcome.exit_code == 0, again.log
    assert [event["step"] for event in again.of("step")] == [last + 1, last + 2]
    trained = sorted(group for event in (*first.of("step"), *again.of("step")) for group in event["groups"])
    assert trained == list(range(4 * (last + 2)))


def test_a_warning_after_the_last_step_changes_nothing(run_loop):
    control = RunControl()
    tick = after_steps(3, lambda: control.preempt("SIGUSR2"))
    run = run_loop(control=control, on_tick=tick, run={"steps": 3})
    assert_kept_its_promises(run)
    assert_trained_in_order(run)


def test_a_trainer_that_is_away_is_asked_again(run_loop):
    control = RunControl()
    control.preempt("SIGUSR2")  # before there is one
    run = run_loop(control=control, plan=kills("trainer", "trained"), run={"steps": ENDLESS_STEPS})
    assert run.outcome.exit_code == 140, run.log
    assert_nothing_is_left(run)


def test_a_run_that_does_not_make_room_in_time_is_stopped(run_loop):
    control = RunControl()
    tick = after_steps(1, lambda: control.preempt("SIGUSR2"))
    run = run_loop(control=control, on_tick=tick, run={"steps": ENDLESS_STEPS, "grace_s": 0.0})
    assert run.outcome.exit_code == 140, run.log
    assert_nothing_is_left(run)


@pytest.mark.fault
def test_a_stop_waits_for_the_queue_to_count_the_step_at_hand(run_loop):
    """The stop comes while the trainer is at it; the queue, which stands still, answers two seconds later."""
    control = RunControl()

    def tick(folder):
        events, _ = read_events(folder / "events.jsonl")
        if (trainer := stopped_trainer(events)) is None:
            return
        (queue,) = [
            each["pid"] for each in events if each["kind"] == "child_spawned" and each["child"] == "queue"
        ]
        if not control.stopping:
            os.kill(queue, signal.SIGSTOP)
            control.stop("SIGTERM")
        elif any(each["kind"] == "supervisor_stopping" for each in events):
            trainer.resume()
            threading.Timer(2.0, os.kill, (queue, signal.SIGCONT)).start()

    at_it = Fault(actor="trainer", point="trained", action=Action.STOP)
    run = run_loop(control=control, on_tick=tick, plan=[at_it], run={"steps": ENDLESS_STEPS})
    assert run.outcome.exit_code == 143, run.log
    assert [event["step"] for event in run.of("checkpoint_saved")] == [1], run.log
    assert_nothing_is_left(run)
