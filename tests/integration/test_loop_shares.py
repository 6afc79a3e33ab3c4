"""Replicas of a real loop share its prompts, each of which has room for all of them."""

import os
import signal
import time
from collections import Counter

import pytest
from loop_run import assert_kept_its_promises

from relax_actor.telemetry import read_events
from relax_actor.transfer_queue.events import PromptLeased

pytestmark = pytest.mark.timeout(180)

REPLICAS, STEPS, GROUPS, SAMPLES = 3, 8, 12, 4


def leases(run):
    return [event for event in run.journal if isinstance(event, PromptLeased)]


def shares(run):
    """Return how many samples of each version every replica has got, without those of the start."""
    by_version = {}
    for lease in leases(run):
        by_version.setdefault(lease.version, Counter())[lease.holder.name] += len(lease.rows)
    return [by_version[version] for version in sorted(by_version)[1:]]


def run_of(run_loop, **changes):
    return run_loop(
        run={"max_staleness": 0, "mode": "async_on_policy", "steps": STEPS},
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
    """At most one share in the run is lost to a replica that a busy machine does not let come in time."""
    run = run_of(run_loop)
    assert_kept_its_promises(run)
    assert all(len(lease.rows) == SAMPLES for lease in leases(run)), "no group is split"
    even = [
        max(each.values()) - min(each.values()) <= SAMPLES and len(each) == REPLICAS for each in shares(run)
    ]
    assert sum(even) >= len(even) - 2, shares(run)


def test_what_a_stopped_replica_was_given_goes_to_the_others_when_it_is_killed(run_loop):
    """Nothing waits for it longer than it lives; its next incarnation has its share again."""
    state = {}

    def stop_then_kill(folder):
        log = folder / "events.jsonl"
        events = read_events(log)[0] if log.exists() else []
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

    run = run_of(run_loop, on_tick=stop_then_kill)
    assert run.killed == ["rollout/2"], run.log
    assert_kept_its_promises(run, waits=False)
    incarnations = {lease.holder.incarnation for lease in leases(run) if lease.holder.name == "rollout/2"}
    assert incarnations == {1, 2}, run.log
