"""Whole runs whose rollouts sample with servers that die, hang, break and lie: no sample is lost."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import fake_sglang
import psutil
import pytest
from loop_run import (
    LoopRunner,
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_nothing_is_left,
    assert_trainer_went_on,
)

from relax_actor.telemetry import read_events

pytestmark = pytest.mark.fault


@pytest.fixture
def loop(tmp_path, tiny_model):
    return LoopRunner(tmp_path, tiny_model)


@pytest.fixture
def rollout(tmp_path):
    """Return the rollout's settings, with servers that do as they are told."""

    def settings(*, replicas=1, health_s=1.0, **script):
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
    run = loop(rollout=rollout(once=str(tmp_path / "once"), **script))

    assert_kept_its_promises(run)
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
        events = read_events(folder / "events.jsonl")[0] if (folder / "events.jsonl").exists() else []
        steps = sum(event["kind"] == "step" for event in events)
        mine = [event for event in events if event["kind"] == "engine_updated"]
        if len(killed) < 3 and steps > len(killed) and mine:
            pid = mine[-1]["pid"]
            server = next(
                e["server_pid"] for e in events if e["kind"] == "engine_started" and e["pid"] == pid
            )
            target = server if victim == "server" else pid
            if target not in killed:
                killed.append(target)
                if psutil.pid_exists(target):
                    os.kill(target, signal.SIGKILL)

    run = loop(rollout=rollout(token_s=0.01), run={"steps": 6}, on_tick=kill)

    assert_kept_its_promises(run)
    assert_trainer_went_on(run)
    assert len(killed) == 3
    assert len(started(run)) >= 4
    assert servers_of(run) == []


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_partial_samples_go_on_where_another_server_died(loop, rollout):
    killed = threading.Event()

    def kill(folder: Path) -> None:
        events = read_events(folder / "events.jsonl")[0] if (folder / "events.jsonl").exists() else []
        servers = [event["server_pid"] for event in events if event["kind"] == "engine_started"]
        updated = [event for event in events if event["kind"] == "engine_updated" and event["version"] >= 1]
        if updated and not killed.is_set():
            time.sleep(0.2)
            killed.set()
            os.kill(servers[0], signal.SIGKILL)

    settings = rollout(token_s=0.02) | {"chunk_tokens": 4, "max_new_tokens": 30}
    run = loop(rollout=settings, on_tick=kill)

    assert_kept_its_promises(run)
    assert run.of("samples_continued")


def test_a_prompt_that_the_server_refuses_is_dropped_with_its_reason(loop, rollout):
    run = loop(rollout=rollout(fail={"/generate#5": 400}))

    assert_kept_its_promises(run)
    assert len(started(run)) == 1
    assert "told to answer 400" in json.dumps(run.events)


def test_a_spare_takes_over_with_its_server_running(loop, rollout):
    killed: list[int] = []

    def kill(folder: Path) -> None:
        events = read_events(folder / "events.jsonl")[0] if (folder / "events.jsonl").exists() else []
        is_ready = any(event["kind"] == "spare_ready" for event in events)
        mine = [event for event in events if event["kind"] == "engine_updated"]
        if not killed and is_ready and mine:
            killed.append(mine[-1]["pid"])
            os.kill(killed[0], signal.SIGKILL)

    run = loop(
        rollout=rollout(token_s=0.05, slow_start_s=1.0) | {"spares": 1}, run={"steps": 12}, on_tick=kill
    )

    assert_kept_its_promises(run)
    assert_active_at_the_end(run, "rollout/0")
    (taken,) = run.of("restart_by_spare")
    (active,) = run.of("child_active", child="rollout/0", incarnation=taken["incarnation"])
    assert active["m"] - taken["m"] < 1.0, "it waited for a server"
