"""Replicas of a real loop share its prompts, each of which has room for all of them."""

import os
import signal
import time
from collections import Counter

import pytest
from loop_run import ENDLESS_STEPS, assert_kept_its_promises

from relax_actor.app import RunControl
from relax_actor.ids import Holder
from relax_actor.telemetry import read_events
from relax_actor.transfer_queue.askers import HOLD_S
from relax_actor.transfer_queue.events import PromptLeased
from relax_actor.transfer_queue.journal import read

pytestmark = pytest.mark.timeout(180)

AGAIN = Holder("rollout/2", 2)
REPLICAS, STEPS, GROUPS, SAMPLES = 3, 8, 12, 4


def leases(run):
    return [event for event in run.journal if isinstance(event, PromptLeased)]


def shares(run):
    """Return how many samples of each version every replica has got, without those of the start."""
    by_version = {}
    for lease in leases(run):
        by_version.setdefault(lease.version, Counter())[lease.holder.name] += len(lease.rows)
    return [by_version[version] for version in sorted(by_version)[1:]]


def delays_s(run):
    """Return for each of the same versions how much later the last replica had it than the first."""
    had = {}
    for event in run.of("policy_installed"):
        had.setdefault(event["version"], []).append(event["m"])
    versions = sorted({lease.version for lease in leases(run)})[1:]
    return [max(had[version]) - min(had[version]) for version in versions]


def run_of(run_loop, *, steps=STEPS, **changes):
    return run_loop(
        run={"max_staleness": 0, "mode": "async_on_policy", "steps": steps},
        rollout={
            "replicas": REPLICAS,
            "samples_per_prompt": SAMPLES,
            "max_in_flight": 256,
            "scripted_token_s": 0.02,
        },
        train={"global_batch_size": GROUPS * SAMPLES},
        **changes,
    )


def test_replicas_get_as_much_as_one_another_and_whole_groups(run_loop):
    """But where a busy machine does not let a replica come in time, who loses a share, to two versions."""
    run = run_of(run_loop)
    assert_kept_its_promises(run)
    assert all(len(lease.rows) == SAMPLES for lease in leases(run)), "no group is split"
    even = [
        max(each.values()) - min(each.values()) <= SAMPLES and len(each) == REPLICAS for each in shares(run)
    ]
    assert any(even), shares(run)
    on_time = [late_s <= HOLD_S for late_s in delays_s(run)]
    uneven = [each for each in zip(even, on_time, strict=True) if each == (False, True)]
    assert len(uneven) <= 2, (shares(run), delays_s(run))


def test_what_a_stopped_replica_was_given_goes_to_the_others_when_it_is_killed(run_loop):
    """Nothing waits for it longer than it lives; its next incarnation has its share again."""
    state, control = {}, RunControl()

    def stop_then_kill(folder):
        events, _ = read_events(folder / "events.jsonl")
        steps = sum(event["kind"] == "step" for event in events)
        active = [
            event["pid"]
            for event in events
            if event.get("child") == "rollout/2" and event["kind"] == "child_active"
        ]
        if steps >= 2 and active and "pid" not in state:
            state.update(pid=active[-1], kill_at=time.monotonic() + 0.5)
            os.kill(state["pid"], signal.SIGSTOP)
        elif time.monotonic() > state.get("kill_at", float("inf")):
            del state["kill_at"]
            os.kill(state["pid"], signal.SIGKILL)
        elif len(active) == 2 and any(
            isinstance(event, PromptLeased) and event.holder == AGAIN
            for event in read(*folder.glob("queue-*.journal"))
        ):
            control.stop("SIGTERM")

    run = run_of(run_loop, steps=ENDLESS_STEPS, control=control, on_tick=stop_then_kill)
    assert run.killed == ["rollout/2"], run.log
    assert_kept_its_promises(run, waits=False)
    incarnations = {lease.holder.incarnation for lease in leases(run) if lease.holder.name == "rollout/2"}
    assert incarnations == {1, 2}, run.log
