"""The part `colocate` of `sglang_loop.py`: trainer and one replica take turns on one GPU, under two kills.

The server's cache has most of the GPU, so that both sides would not fit side by side.
"""

import argparse
import contextlib
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from common import spread
from sglang_runs import ON_GPU, Run
from sglang_scenes import server_options

STEPS = 10
KILLS = {3: "rollout/0", 6: "trainer"}
"""Who is killed after which step."""

LOOK_S = 0.1


class Watcher:
    """Looks at the GPU's memory, and kills by plan.

    Args:
        run: a `Run` of the loop.
        on_gpu: whether there is memory to look at.
    """

    def __init__(self, run: Any, *, on_gpu: bool) -> None:
        self._run, self._plan, self._looked = run, dict(KILLS), 0.0
        self.kills: list[dict[str, Any]] = []
        self.used_bytes: list[tuple[float, int]] = []
        self.is_done = False
        self._gpu = None
        if on_gpu:
            import pynvml  # noqa: PLC0415 - only where there is a GPU

            pynvml.nvmlInit()
            self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def look(self) -> None:
        """Look, and kill if it is time."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        if self._gpu is not None:
            self.used_bytes.append((self._looked, self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used))
        for step in [step for step in self._plan if self._run.steps() >= step]:
            who = self._plan.pop(step)
            last = self._run.of("turn_began", actor=who)[-1]
            with contextlib.suppress(ProcessLookupError):
                os.kill(last["pid"], signal.SIGKILL)
                self.kills.append({"actor": who, "incarnation": last["inc"], "m": self._looked})


def measure(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run ten steps in turns; say what they took, what memory each side had, and what the kills cost.

    Args:
        folder: for the run's.
        args: of the command line.
        found: where it is written.
    """
    words = tuple(server_options()["sglang_args"])  # without the bound of the cache
    run = Run(
        folder,
        args,
        "colocate",
        replicas=1,
        spares=0,
        run={"steps": STEPS, "max_staleness": 0, "mode": "async_on_policy", "colocate": True},
        rollout={"sglang_args": words} | ({"device": "cuda:0"} if ON_GPU else {}),
        train={"checkpoint_every": 1},
    )
    watcher = Watcher(run, on_gpu=ON_GPU)
    run.go(watcher, to_the_end=True)
    turns = _turns(run.events)
    found |= run.summary() | {
        "killed": [kill["actor"] for kill in watcher.kills],
        "phases_s": _phases(run),
        "turns_s": {who: spread([b - a for a, b in spans]) for who, spans in turns.items() if spans},
        "frees_memory": sorted({e["frees_memory"] for e in run.of("turn_ended") if "frees_memory" in e}),
        "late": len(run.of("turn_late")),
        "both_at_once": sum(
            a[0] < b[1] and b[0] < a[1] for a in turns["trainer"] for b in turns["rollout/0"]
        ),
        "peak_gib": {who: _peak_gib(watcher.used_bytes, spans) for who, spans in turns.items()}
        | {"all": _peak_gib(watcher.used_bytes, [(0.0, time.monotonic())])},
        "again_after_kill_s": [_again(run, kill) for kill in watcher.kills],
    }


def _turns(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return the turns of each side; one that a death ended ends with the last that was heard."""
    begun: dict[tuple[str, int], float] = {}
    heard: dict[tuple[str, int], float] = {}
    found: dict[str, list[tuple[float, float]]] = {"trainer": [], "rollout/0": []}
    for event in sorted(events, key=lambda each: each["m"]):
        who = event["actor"], event["inc"]
        if event["kind"] == "turn_began":
            begun[who] = event["m"]
        elif event["kind"] == "turn_ended":
            found[who[0]].append((begun.pop(who), event["m"]))
        heard[who] = event["m"]
    for who, since in begun.items():
        found[who[0]].append((since, heard[who]))
    return found


def _phases(run: Any) -> dict[str, float]:
    """Return the median of each phase of a step, in seconds."""
    values = {name: [e[name] for e in run.of("step") if name in e] for name in ("sleep_s", "onload_s")}
    values |= {name: [e[name] for e in run.of("step") if name in e] for name in ("train_s", "offload_s")}
    values["wake_s"] = [e["wake_s"] for e in run.of("turn_began") if e.get("wake_s")]
    values["install_s"] = [e["seconds"] for e in run.of("policy_installed")]
    return {name: round(statistics.median(found), 4) for name, found in values.items() if found}


def _peak_gib(used_bytes: list[tuple[float, int]], spans: list[tuple[float, float]]) -> float | None:
    inside = [used for at, used in used_bytes if any(begin <= at <= end for begin, end in spans)]
    return round(max(inside) / 2**30, 2) if inside else None


def _again(run: Any, kill: dict[str, Any]) -> dict[str, Any]:
    """Return when the killed had its next turn and had done something in it, in seconds after its death.

    A rollout has done something when a policy version is installed, a trainer when it has made a step.
    """

    def after(kind: str) -> float | None:
        later = [
            event["m"] - kill["m"]
            for event in run.of(kind, actor=kill["actor"])
            if event["inc"] > kill["incarnation"]
        ]
        return round(min(later), 3) if later else None

    works = "step" if kill["actor"] == "trainer" else "policy_installed"
    return {"actor": kill["actor"], "next_turn_s": after("turn_began"), "works_s": after(works)}
