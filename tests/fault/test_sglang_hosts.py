"""A replica over two hosts, whichever half of it dies: it starts again whole, and nothing is lost."""

import json
import os
import signal
from contextlib import suppress

import fake_sglang
import psutil
import pytest
from loop_hosts import loop_hosts
from loop_run import (
    LoopRunner,
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_trained_in_order,
    assert_trainer_went_on,
)

from relax_actor.faults import Action, Fault
from relax_actor.placement import Placement, Seat
from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

DEADLINE_S = 200.0


@pytest.fixture
def loop(tmp_path, tiny_model):
    return LoopRunner(tmp_path, tiny_model)


@pytest.fixture
def rollout(tmp_path):
    """Return the rollout's settings: servers of two nodes that do as they are told."""

    def settings(*, replicas=1, **script):
        script = {"token_s": 0.005, "kv_tokens": 4096} | script
        return {
            "engine": "sglang",
            "replicas": replicas,
            "tensor_parallel": 2,
            "hosts_per_replica": 2,
            "sglang_python": str(fake_sglang.stand_in(tmp_path)),
            "sglang_env": {"FAKE_SGLANG": json.dumps(script)},
        }

    return settings


def over(hosts, *seats):
    """Place rollouts and parts: `rollout/0=a` and so on."""
    pairs = (each.split("=") for each in seats)
    return Placement(
        hosts=tuple(hosts.names), seats=tuple(Seat(actor=actor, host=host) for actor, host in pairs)
    )


def assert_nothing_was_lost(run, hosts, *, is_back=True):
    """I2, I3, I4, I5, I7, I8; the first replica may still be starting where another one goes on."""
    assert_kept_its_promises(run, waits=False)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    if is_back:
        assert_active_at_the_end(run, "rollout/0")
    hosts.assert_nothing_is_left(run)
    assert survivors(run) == []


def survivors(run):
    """Return the servers' main processes that are still there, on either host."""
    pids = {event["server_pid"] for event in (*run.of("engine_started"), *run.of("part_started"))}
    return [pid for pid in pids if psutil.pid_exists(pid)]


class Strikes:
    """Does one thing after another to a replica, each time it has installed a version and a step is done.

    Args:
        whats: `far`, `part`, `near`, `rollout`: which process is killed; `stopped part`: stopped, not killed.
        replica: whose.
    """

    def __init__(self, *whats, replica=0):
        self.waiting, self._struck = list(whats), set()
        self._rollout, self._part = f"rollout/{replica}", f"part/{replica}"

    def __call__(self, folder):
        log = folder / "events.jsonl"
        events = read_events(log)[0] if log.exists() and self.waiting else []
        updated = self._last(events, "engine_updated", self._rollout)
        steps = sum(event["kind"] == "step" for event in events)
        if updated is None or updated["inc"] in self._struck or steps <= len(self._struck):
            return
        self._struck.add(updated["inc"])
        near = self._last(events, "engine_started", self._rollout)
        far = self._last(events, "part_started", self._part)
        what = self.waiting.pop(0)
        pid = {"far": far["server_pid"], "part": far["pid"], "stopped part": far["pid"]}.get(what)
        pid = pid or {"near": near["server_pid"], "rollout": near["pid"]}[what]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if what == "stopped part" else signal.SIGKILL)
        if what == "stopped part":  # nobody needs it, until there is to be another server
            os.kill(near["server_pid"], signal.SIGKILL)

    @staticmethod
    def _last(events, kind, actor):
        return next((each for each in reversed(events) if (each["kind"], each["actor"]) == (kind, actor)), None)


def test_a_replica_over_two_hosts_samples_and_leaves_nothing(loop, rollout):
    with loop_hosts(2) as hosts:
        run = loop(rollout=rollout(), **hosts.settings(over(hosts, "rollout/0=a", "part/0=b")))
        assert_nothing_was_lost(run, hosts)
    assert {event["route"] for event in run.of("engine_updated")} == {"group"}
    (part,), (engine,) = run.of("part_started"), run.of("engine_started")
    assert (part["actor"], part["rollout"], part["incarnation"], part["node"]) == ("part/0", "rollout/0", 1, 1)
    assert engine["tp"] == 2
    assert not run.killed
    assert not run.of("child_restarting")
    assert list((run.folder / "crash").iterdir()) == []


def test_a_replica_starts_again_whole_whichever_of_its_processes_dies(loop, rollout):
    """The server's half on the other host, the part, the half on the rollout's host, the rollout; each once."""
    strikes = Strikes("far", "part", "near", "rollout")
    with loop_hosts(2) as hosts:
        run = loop(
            rollout=rollout(token_s=0.01),
            run={"steps": 7},
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=b", "part/0=a")),
        )
        assert_nothing_was_lost(run, hosts)
    assert strikes.waiting == []
    whole = [event["incarnation"] for event in run.of("part_started")]
    assert len(run.of("engine_started")) >= 5, run.log
    assert {event["inc"] for event in run.of("engine_started")} <= set(whole)
    parts = [event["inc"] for event in run.of("part_started")]
    assert len(parts) == len(set(parts)), "a part served twice"


def test_a_part_that_is_stopped_does_not_hold_up_its_replica(loop, rollout):
    """Once before it answers, and once after its server has come up, when the next one has to start."""
    strikes = Strikes("far", "stopped part")
    hangs = Fault(actor="part/0", point="part_asked", action=Action.STOP, incarnation=2)
    with loop_hosts(2) as hosts:
        run = loop(
            plan=[hangs],
            rollout=rollout(token_s=0.01),
            run={"steps": 4},
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=a", "part/0=b")),
        )
        assert_nothing_was_lost(run, hosts)
    assert strikes.waiting == []
    assert "no part/0, which did not start its server" in json.dumps(run.of("child_exited", child="rollout/0"))


def test_the_other_replicas_go_on(loop, rollout):
    strikes = Strikes("far", "part")
    with loop_hosts(2) as hosts:
        seats = ("rollout/0=a", "part/0=b", "rollout/1=b", "part/1=a")
        run = loop(
            rollout=rollout(replicas=2, token_s=0.02),
            run={"steps": 6},
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, *seats)),
        )
        assert_nothing_was_lost(run, hosts, is_back=False)
    assert strikes.waiting == []
    assert len(run.of("child_spawned", child="rollout/1")) == len(run.of("child_spawned", child="part/1")) == 1


def test_a_part_whose_server_does_not_start_is_named_with_its_last_word(loop, rollout):
    with loop_hosts(2) as hosts:
        run = loop(
            rollout=rollout(die_at_start=True, far_dies=True),
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=a", "part/0=b")),
        )
        assert run.outcome.exit_code == 1
        hosts.assert_nothing_is_left(run)
    assert "linked to `part/0`, which failed" in run.outcome.reason
    assert "node 1 ended with exit code 3; its last word: ValueError: no such model" in run.outcome.reason
