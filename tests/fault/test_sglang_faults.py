"""Whole runs whose rollouts sample with servers that die, hang, break and lie: no sample is lost."""

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import fake_sglang
import psutil
import pytest
from loop_faults import are_active, is_active_again
from loop_run import (
    LoopRunner,
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_nothing_is_left,
    assert_trainer_went_on,
)

from relax_actor.telemetry import Event, read_events
from relax_actor.transfer_queue.events import ChunkPut, SamplesPut
from relax_actor.transfer_queue.journal import read

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]


@pytest.fixture
def loop(tmp_path, tiny_model):
    return LoopRunner(tmp_path, tiny_model)


@pytest.fixture
def rollout(tmp_path):
    """Return the rollout's settings, with servers that do as they are told."""

    def settings(*, replicas=1, health_s=20.0, **script):
        script = {"token_s": 0.002, "kv_tokens": 4096} | script
        return {
            "engine": "sglang",
            "replicas": replicas,
            "health_s": health_s,
            "sglang_python": str(fake_sglang.stand_in(tmp_path)),
            "sglang_env": {"FAKE_SGLANG": json.dumps(script)},
        }

    return settings


def servers_of(run) -> list[int]:
    """Return the pids of the run's servers that are still there."""
    return [pid for pid in {event["server_pid"] for event in started(run)} if is_alive(pid)]


def started(run):
    return run.of("engine_started")


def test_a_run_samples_with_a_server(loop, rollout):
    run = loop(rollout=rollout(replicas=2))
    assert_kept_its_promises(run)
    assert len(started(run)) == 2
    assert {event["mode"] for event in run.of("engine_updated")} == {"in_place"}
    assert servers_of(run) == []


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ({"fail": {"/generate#20": "die"}}, "SGLang's main process"),
        ({"fail": {"/update_weights_from_tensor#2": "die"}}, "SGLang's main process"),
        ({"fail": {f"/generate#{call}": "hang" for call in range(20, 60)}}, "generated nothing"),
        ({"lie_version": "0"}, "policy version"),
    ],
    ids=str,
)
def test_a_server_that_fails_costs_a_restart_of_its_rollout_and_nothing_else(
    loop, rollout, tmp_path, script, says
):
    health_s = 1.0 if says == "generated nothing" else 20.0
    run = loop(rollout=rollout(health_s=health_s, once=str(tmp_path / "once"), **script))

    assert_kept_its_promises(run, waits=False)  # for the only server, as long as its start takes
    assert_trainer_went_on(run)
    assert_active_at_the_end(run, "rollout/0")
    died = run.of("child_exited", child="rollout/0")[0]
    assert says in json.dumps(died), died


def test_a_server_that_cannot_start_ends_the_run_with_its_last_word(loop, rollout):
    run = loop(rollout=rollout(die_at_start=True))
    assert run.outcome.exit_code == 1
    assert "exit code 3; its last word: ValueError: no such model" in run.outcome.reason
    assert_nothing_is_left(run)


@pytest.mark.parametrize("victim", ["server", "actor"])
def test_a_kill_in_mid_group_loses_no_sample_and_leaves_no_server(loop, rollout, victim):
    """Three times, whenever a step is done."""
    killed: list[int] = []

    def kill(folder: Path) -> None:
        events = read_events(folder / "events.jsonl")[0]
        steps = sum(event["kind"] == "step" for event in events)
        mine = [event for event in events if event["kind"] == "engine_updated"]
        if len(killed) < 3 and steps > len(killed) and mine and mine[-1]["pid"] not in killed:
            actor = mine[-1]["pid"]
            killed.append(actor)
            terminate(server_of(actor, events) if victim == "server" else actor)

    def is_back(events: Sequence[Event]) -> bool:
        return len(killed) == 3 and are_active(["rollout/0"], events) and len(lives(events)) > 3

    run = loop.until(is_back, rollout=rollout(token_s=0.01), on_tick=kill)

    assert_kept_its_promises(run, waits=False)  # for the only server, as long as its start takes
    assert_trainer_went_on(run)
    assert len(killed) == 3
    assert len(started(run)) >= 4
    assert servers_of(run) == []


def lives(events: Sequence[Event]) -> set[int]:
    """Return the incarnations of the first rollout that were active."""
    active = [event for event in events if event["kind"] == "child_active"]
    return {event["incarnation"] for event in active if event["child"] == "rollout/0"}


def server_of(actor: int, events: Sequence[Event]) -> int:
    """Return the pid of the server that a rollout's process has started."""
    return next(e["server_pid"] for e in events if e["kind"] == "engine_started" and e["pid"] == actor)


def terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_partial_samples_go_on_where_another_server_died(loop, rollout):
    """Killed when the queue has a part of a sample, and once more if the rest came all the same."""
    killed: set[int] = set()

    def kill(folder: Path) -> None:
        events = read_events(folder / "events.jsonl")[0]
        updated = [event for event in events if event["kind"] == "engine_updated" and event["version"] >= 1]
        if is_continued(events):
            return
        if updated and (actor := updated[-1]["pid"]) not in killed and has_parts(folder):
            killed.add(actor)
            terminate(server_of(actor, events))

    def is_continued(events: Sequence[Event]) -> bool:
        return any(event["kind"] == "samples_continued" for event in events)

    settings = rollout(token_s=0.02) | {"chunk_tokens": 4, "max_new_tokens": 60}
    run = loop.until(is_continued, rollout=settings, on_tick=kill)

    assert_kept_its_promises(run, waits=False)  # for the only server, as long as its start takes
    assert run.of("samples_continued")


def has_parts(folder: Path) -> bool:
    """Whether the queue has a part of a sample of which the rest is on its way."""
    parts: set[tuple[int, int]] = set()
    for event in (each for path in folder.glob("queue-*.journal") for each in read(path)):
        match event:
            case ChunkPut(chunk=chunk):
                parts.add((chunk.group_id, chunk.sample_index))
            case SamplesPut(samples=samples):
                parts -= {(sample.group_id, sample.sample_index) for sample in samples}
    return bool(parts)


def test_a_prompt_that_the_server_refuses_is_dropped_with_its_reason(loop, rollout):
    run = loop(rollout=rollout(fail={"/generate#5": 400}))

    assert_kept_its_promises(run)
    assert len(started(run)) == 1
    assert "told to answer 400" in json.dumps(run.events)


def test_a_spare_takes_over_with_its_server_running(loop, rollout):
    killed: list[int] = []

    def kill(folder: Path) -> None:
        events = read_events(folder / "events.jsonl")[0]
        is_ready = any(event["kind"] == "spare_ready" for event in events)
        mine = [event for event in events if event["kind"] == "engine_updated"]
        if not killed and is_ready and mine:
            killed.append(mine[-1]["pid"])
            terminate(killed[0])

    run = loop.until(
        lambda events: is_active_again("rollout/0", events),
        rollout=rollout(token_s=0.05, slow_start_s=1.0) | {"spares": 1},
        on_tick=kill,
    )

    assert_kept_its_promises(run, waits=False)  # for the only server, as long as its start takes
    assert_active_at_the_end(run, "rollout/0")
    (taken,) = run.of("restart_by_spare")
    (active,) = run.of("child_active", child="rollout/0", incarnation=taken["incarnation"])
    (server,) = run.of("engine_started", pid=active["pid"])
    assert server["m"] < taken["m"], "it waited for a server"
