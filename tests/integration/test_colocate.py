"""Trainer and rollouts take turns: one side at a time, as good as without, and whoever dies blocks nobody."""

import os
import signal

import pytest
from loop_faults import stopped_trainer
from loop_run import assert_nothing_is_left, assert_trained_in_order, assert_trainer_went_on, kills

from relax_actor.faults import Action, Fault
from relax_actor.telemetry import read_events

pytestmark = pytest.mark.timeout(240)

ON_POLICY = {"max_staleness": 0, "mode": "async_on_policy", "steps": 4}
TURNS = {**ON_POLICY, "colocate": True, "colocate_sleep_s": 20.0}
REAL = {"engine": "transformers", "deterministic": True, "replicas": 2, "samples_per_prompt": 4}


def turns(run):
    """Return (begin, end, who) of every turn; one that a death ended ends with the last that was heard."""
    begun, heard, found = {}, {}, []
    for event in sorted(run.events, key=lambda each: each["m"]):
        who = event["actor"], event["inc"]
        if event["kind"] == "turn_began":
            begun[who] = event["m"]
        elif event["kind"] == "turn_ended":
            found.append((begun.pop(who), event["m"], who[0]))
        heard[who] = event["m"]
    return found + [(begin, heard[who], who[0]) for who, begin in begun.items()]


def assert_one_side_at_a_time(run):
    trainer = [(begin, end) for begin, end, who in turns(run) if who == "trainer"]
    assert trainer
    for begin, end, who in turns(run):
        if who != "trainer":
            assert not any(begin < last and first < end for first, last in trainer), turns(run)


def assert_good(run, steps=4):
    assert run.outcome.exit_code == 0, run.log
    assert [event["step"] for event in run.history] == list(range(1, steps + 1))
    assert_trained_in_order(run)
    assert_one_side_at_a_time(run)
    assert_nothing_is_left(run)


def test_the_two_sides_take_turns_and_learn_what_they_would_have_learned_without(run_loop):
    plain = run_loop(run=ON_POLICY, rollout=REAL)
    turned = run_loop(run=TURNS, rollout=REAL)
    assert_good(turned)
    assert turned.weights == plain.weights
    for step in turned.of("step"):
        assert {"sleep_s", "onload_s", "offload_s"} <= step.keys()
    assert len([each for each in turns(turned) if each[2] == "trainer"]) == 4
    slept = turned.of("turn_ended", actor="rollout/0")
    assert slept
    assert all(each["frees_memory"] and each["parked"] == 0 for each in slept)


@pytest.mark.parametrize(
    "where",
    ["falling_asleep", "asleep", "waking", "leased"],
)
def test_a_rollout_may_die_at_any_time(run_loop, where):
    run = run_loop(run=TURNS, rollout=REAL, plan=kills("rollout/0", (where, 2)))
    assert run.killed == ["rollout/0"]
    assert_good(run)
    assert_trainer_went_on(run)


@pytest.mark.parametrize("where", ["turn_taken", "trained", "offloaded", "turn_given_up"])
def test_a_trainer_may_die_at_any_time(run_loop, where):
    run = run_loop(run=TURNS, rollout=REAL, plan=kills("trainer", (where, 2)), train={"checkpoint_every": 1})
    assert run.killed == ["trainer"]
    assert_good(run)


def test_a_rollout_that_does_not_sleep_is_ended(run_loop):
    stop = Fault(actor="rollout/0", point="falling_asleep", action=Action.STOP)
    run = run_loop(run={**TURNS, "colocate_sleep_s": 5.0}, rollout=REAL, plan=[stop])
    late = run.of("turn_late")
    assert late, run.log
    assert late[0]["rollout"] == "rollout-0"
    assert late[0]["killed_pid"]
    assert "5 s" in late[0]["reason"]
    assert run.killed == ["rollout/0"]
    assert_good(run)
    assert_trainer_went_on(run)


def test_samples_in_flight_are_parked(run_loop):
    """Of twice as many groups as a batch needs some are not done when it is; they are not waited for."""
    run = run_loop(
        run={**TURNS, "colocate_sleep_s": 0.8},
        rollout={"scripted_token_s": 0.06, "max_new_tokens": 40, "max_in_flight": 16},
        queue={"over_sampling": 2.0},
    )
    assert run.outcome.exit_code == 0, run.log
    assert len(run.trained) == len(set(run.trained))
    assert all(event["balances"] for event in run.of("ledger"))
    assert all(step["staleness"] == {"0": 16} for step in run.history)
    assert_one_side_at_a_time(run)
    assert_nothing_is_left(run)
    assert sum(each["parked"] for each in run.of("turn_ended") if "parked" in each)


def test_killed_from_outside_while_asleep(run_loop):
    def kill_who_sleeps(folder):
        events, _ = read_events(folder / "events.jsonl")
        if (trainer := stopped_trainer(events)) is not None:  # it has its turn
            pid = [event for event in events if event["actor"] == "rollout/1"][-1]["pid"]
            os.kill(pid, signal.SIGKILL)
            trainer.resume()

    trains = Fault(actor="trainer", point="trained", nth=2, action=Action.STOP)
    run = run_loop(run={**TURNS, "steps": 6}, rollout=REAL, plan=[trains], on_tick=kill_who_sleeps)
    assert run.killed == ["rollout/1"], run.log
    assert_good(run, steps=6)
    assert_trainer_went_on(run)
