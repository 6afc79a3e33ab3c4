"""A whole run with a real SGLang server, of which every process dies, or hangs, while it samples."""

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest
from loop_run import (
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_trained_in_order,
    assert_trainer_went_on,
)

from relax_actor.telemetry import Event, read_events

pytestmark = [pytest.mark.sglang, pytest.mark.fault, pytest.mark.timeout(600)]

DEADLINE_S = 500.0
INCIDENTS = {
    "scheduler": "SGLang's process scheduler",
    "server": "SGLang's main process",
    "actor": "SIGKILL",
    "hang": "generated nothing",
}
"""What happens to one server after the other, and what is said of how its rollout ended."""


class Saboteur:
    """Does one thing to each server, when it samples for a policy that was trained after the last."""

    def __init__(self) -> None:
        self.waiting = list(INCIDENTS)
        self.processes: dict[int, float] = {}  # of all servers there were: pid, and when it began
        self._victims: set[int] = set()

    def __call__(self, folder: Path) -> None:
        log = folder / "events.jsonl"
        events = read_events(log)[0] if log.exists() else []
        updated = [event for event in events if event["kind"] == "engine_updated"]
        if not self.waiting or not updated or (actor := updated[-1]["pid"]) in self._victims:
            return
        steps = sum(event["kind"] == "step" for event in events)
        server = next(e for e in events if e["kind"] == "engine_started" and e["pid"] == actor)
        if steps > len(self._victims) and is_sampling(server["url"]):
            self._strike(self.waiting[0], actor, psutil.Process(server["server_pid"]))
            self._victims.add(actor)
            self.waiting.pop(0)

    def is_over(self, events: Sequence[Event]) -> bool:
        """Say whether all of it was done, and a rollout samples that has seen nothing of it."""
        active = [event["pid"] for event in events if event["kind"] == "child_active"]
        return not self.waiting and active[-1] not in self._victims

    def _strike(self, what: str, actor: int, server: psutil.Process) -> None:
        children = server.children(recursive=True)
        self.processes |= {each.pid: each.create_time() for each in (server, *children)}
        scheduler = next(each.pid for each in children if "scheduler" in " ".join(each.cmdline()))
        match what:
            case "scheduler":
                os.kill(scheduler, signal.SIGKILL)
            case "server":
                os.kill(server.pid, signal.SIGKILL)
            case "actor":
                os.kill(actor, signal.SIGKILL)
            case "hang":
                os.kill(scheduler, signal.SIGSTOP)

    def survivors(self) -> list[int]:
        """Return the processes of all those servers that are still there."""
        return [pid for pid, began in self.processes.items() if _began(pid) == began]


def _began(pid: int) -> float:
    try:
        process = psutil.Process(pid)
        return process.create_time() if process.status() != psutil.STATUS_ZOMBIE else 0.0
    except psutil.NoSuchProcess:
        return 0.0


def is_sampling(url: str) -> bool:
    """Say whether requests are in flight at the server."""
    try:
        with urllib.request.urlopen(f"{url}/v1/loads", timeout=2) as answer:  # noqa: S310 - our own server
            loads = json.loads(answer.read())["loads"]
    except (OSError, HTTPException, ValueError):
        return False
    return sum(load["num_running_reqs"] for load in loads) > 1


def is_free(url: str, run_id: str) -> bool:
    """Say whether somebody else may listen where this server did, or does so already."""
    port = int(url.rpartition(":")[2])
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen()
    except OSError:
        users = {each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port}
        return not any(run_id in _mark(pid) for pid in users if pid)
    return True


def _mark(pid: int) -> str:
    try:
        return psutil.Process(pid).environ().get("RELAX_ACTOR_MARK", "")
    except psutil.NoSuchProcess:
        return ""


def test_no_sample_is_lost_whichever_process_of_a_server_dies_in_mid_group_or_hangs(run_loop, sglang_python):
    """I2, I3, I4, I5, I7, I8: scheduler, main process and actor are killed, then a scheduler is stopped."""
    saboteur = Saboteur()
    run = run_loop.until(
        saboteur.is_over,
        rollout={
            "engine": "sglang",
            "replicas": 1,
            "max_new_tokens": 48,
            "health_s": 4.0,
            "sglang_python": sglang_python,
        },
        # On policy: while a group is sampled no update comes, so a hang is found by asking for a token.
        run={"max_staleness": 0, "mode": "async_on_policy"},
        on_tick=saboteur,
        deadline_s=DEADLINE_S,
    )

    assert saboteur.waiting == [], run.log
    assert_kept_its_promises(run, waits=False)  # for the only server, as long as its start takes
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert_active_at_the_end(run, "rollout/0")
    ends = [json.dumps(event) for event in run.of("child_exited", child="rollout/0")]
    for says in INCIDENTS.values():
        assert any(says in end for end in ends), (says, ends)
    assert saboteur.survivors() == []
    assert all(is_free(event["url"], run.run_id) for event in run.of("engine_started"))
