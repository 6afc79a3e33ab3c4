"""Kills in a run of the loop with SGLang, by a plan."""

import contextlib
import os
import signal
import time
from typing import Any

import psutil
from sglang_runs import Run

KINDS = ("scheduler", "main", "actor")
"""What is killed of a replica, in turn."""


class Killer:
    """Kills by a plan, each once the replica works and enough others do."""

    def __init__(self, run: Run, plan: list[tuple[str, int]], *, others: int, pause_s: float) -> None:
        self._run, self._plan, self._others, self._pause_s = run, [*plan], others, pause_s
        self.kills: list[dict[str, Any]] = []
        self._next_at, self._looked = 0.0, 0.0

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be killed any more, and everybody is active again."""
        return not self._plan and len(self._active()) == self._run.replicas

    def look(self) -> None:
        """Kill, if it is time."""
        now = time.monotonic()
        if not self._plan or now < self._next_at or now - self._looked < 0.2:
            return
        self._looked = now
        if len(self._run.of("engine_started")) < len(self.kills) + self._run.servers:
            return  # a server that is to take over is still starting
        kind, replica = self._plan[0]
        name, active = f"rollout/{replica}", self._active()
        busy = self._under_way()
        if name in active and len(active) > self._others and busy and self._run.steps() >= len(self.kills):
            pid = self._victim(kind, name)
            if pid is None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills.append(
                    {
                        "kind": kind,
                        "actor": name,
                        "incarnation": active[name],
                        "m": time.monotonic(),
                        "leased": busy,
                    }
                )
                self._plan.pop(0)
                self._next_at = time.monotonic() + self._pause_s

    def _active(self) -> dict[str, int]:
        """Return the incarnations that sample now, by name."""
        active = {event["child"]: event["incarnation"] for event in self._run.of("child_active")}
        newest = {event["child"]: event["incarnation"] for event in self._run.of("child_spawned")}
        killed = {(kill["actor"], kill["incarnation"]) for kill in self.kills}
        return {
            name: number
            for name, number in active.items()
            if newest.get(name, number) == number and (name, number) not in killed
        }

    def _under_way(self) -> int:
        ledger = self._run.of("ledger")
        return ledger[-1]["running"] if ledger else 0

    def _victim(self, kind: str, name: str) -> int | None:
        started = [event for event in self._run.of("engine_started") if event["actor"] == name]
        if not started:
            return None
        server = started[-1]["server_pid"]
        with contextlib.suppress(psutil.Error):
            if kind == "main":
                return server
            if kind == "actor":
                return psutil.Process(server).ppid()
            for child in psutil.Process(server).children(recursive=True):
                if "scheduler" in " ".join(child.cmdline()):
                    return child.pid
        return None
