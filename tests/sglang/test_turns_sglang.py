"""A real SGLang server that takes turns with the trainer: its processes die while it sleeps."""

import os
import signal

import psutil
import pytest
from loop_run import (
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_trained_in_order,
    assert_trainer_went_on,
)

from relax_actor.faults import Action, Fault
from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.sglang, pytest.mark.fault, pytest.mark.timeout(300)]


class SleepingVictims:
    """Kills, while the trainer has its turn: first a server's main process, then the next one's actor."""

    def __init__(self):
        self.waiting = ["server", "actor"]
        self.killed = []

    def __call__(self, folder):
        log = folder / "events.jsonl"
        events = read_events(log)[0] if log.exists() else []
        turns = [each for each in events if each["kind"] in {"turn_began", "turn_ended"}]
        rests = [each for each in turns if each["actor"] == "rollout/0"]
        if not self.waiting or not rests or rests[-1]["kind"] != "turn_ended":
            return
        actor = rests[-1]["pid"]
        if any(victim == actor for victim, _ in self.killed):
            return
        server = next(e for e in events if e["kind"] == "engine_started" and e["pid"] == actor)["server_pid"]
        members = [server, *(each.pid for each in psutil.Process(server).children(recursive=True))]
        os.kill(server if self.waiting.pop(0) == "server" else actor, signal.SIGKILL)
        self.killed.append((actor, members))


def test_a_server_or_its_actor_may_die_asleep(run_loop, sglang_python):
    """I2, I4, I5, I7, I8: the trainer's turn goes on, and the next incarnation waits for its own."""
    victims = SleepingVictims()
    slow = [
        Fault(actor="trainer", point="trained", nth=nth, action=Action.DELAY, seconds=1.5)
        for nth in (1, 2, 3)
    ]
    run = run_loop(
        rollout={"engine": "sglang", "replicas": 1, "max_new_tokens": 12, "sglang_python": sglang_python},
        run={"steps": 5, "max_staleness": 0, "mode": "async_on_policy", "colocate": True},
        on_tick=victims,
        plan=slow,
        deadline_s=200.0,
    )

    assert victims.waiting == [], run.log
    assert_kept_its_promises(run, waits=False)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert_active_at_the_end(run, "rollout/0")
    first, second = (event["reason"] for event in run.of("child_exited", child="rollout/0")[:2])
    assert "SGLang's main process" in first
    assert "SIGKILL" in second
    for _, members in victims.killed:
        assert not [pid for pid in members if psutil.pid_exists(pid)]
