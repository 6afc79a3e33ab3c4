"""What does the death of a rollout cost? Seconds until it samples again, and what the trainer felt.

    python benchmarks/recovery.py MODEL_FOLDER --kills 5

The yardstick is what is done elsewhere, in the same run: starting everything anew, from the start of the
tree until its rollouts are active. Nothing of that run is lost here: the trainer keeps its pid and step.
"""

import argparse
import os
import secrets
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import spread, write
from learning import DEMO, job

from launcher.settings import load
from relax_actor import app
from relax_actor.telemetry import read_events

VICTIM = "rollout/0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder that examples/arithmetic/prepare.py made")
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    overrides = [*job(args.model), "eval.every=0", f"run.steps={3 * args.kills + 3}"]
    folder = Path(tempfile.mkdtemp(prefix="relax-bench-"))
    killer = Killer(folder, args.kills)
    outcome = app.run(load(DEMO, overrides), folder, run_id=secrets.token_hex(4), on_tick=killer.tick)
    if outcome.exit_code:
        raise RuntimeError(f"the run ended with {outcome.exit_code}: {outcome.reason}; see {folder}")
    killer.tick()
    write("recovery-smollm2", figures(killer))


class Killer:
    """Kills the victim a few times, each time two steps after it came back."""

    def __init__(self, folder: Path, kills: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.kills: list[float] = []  # monotonic seconds
        self._wanted, self._log, self._offset = kills, folder / "events.jsonl", 0
        self._seen_step = 0

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def tick(self) -> None:
        new, self._offset = read_events(self._log, self._offset)
        self.events += new
        active = [event for event in self.all("child_active") if event["child"] == VICTIM]
        steps = len(self.all("step"))
        back = len(active) == len(self.kills) + 1
        if back and len(self.kills) < self._wanted and steps >= self._seen_step + 2:
            self._seen_step = steps
            os.kill(active[-1]["pid"], signal.SIGKILL)
            self.kills.append(time.monotonic())


def figures(killer: Killer) -> dict[str, Any]:
    """Compute what the events say."""
    started = killer.all("run_started")[0]["m"]
    active = [event for event in killer.all("child_active") if event["child"] == VICTIM]
    first = max(event["m"] for event in killer.all("child_active") if event["incarnation"] == 1)
    spawned = [event for event in killer.all("child_spawned") if event["child"] == VICTIM]
    back = [event["m"] - kill for event, kill in zip(active[1:], killer.kills, strict=True)]
    process = [event["m"] - kill for event, kill in zip(spawned[1:], killer.kills, strict=True)]
    steps = killer.all("step")
    trainers = {event["pid"] for event in killer.all("child_spawned") if event["child"] == "trainer"}
    hit, spared = _step_times(steps, killer.kills)
    return {
        "workload": "SmolLM2-135M-Instruct, arithmetic; SIGKILL of one of two rollouts in mid-run",
        "kills": len(killer.kills),
        "until_new_process_s": spread(process),
        "until_active_s": spread(back),
        "start_of_everything_s": round(first - started, 3),
        "restart_of_everything_over_ours": round((first - started) / statistics.median(back), 2),
        "trainer_pids": len(trainers),
        "steps_in_order": [event["step"] for event in steps] == list(range(1, len(steps) + 1)),
        "prompts_trained_once": _trained_once(steps),
        "step_s_with_a_kill": spread(hit) if hit else None,
        "step_s_without": spread(spared) if spared else None,
        "trainer_busy_s": spread([event["train_s"] for event in steps[1:]]),
    }


def _step_times(steps: list[dict[str, Any]], kills: list[float]) -> tuple[list[float], list[float]]:
    hit, spared = [], []
    for before, after in pairwise(steps[1:]):
        killed = any(before["m"] <= kill < after["m"] for kill in kills)
        (hit if killed else spared).append(after["m"] - before["m"])
    return hit, spared


def _trained_once(steps: list[dict[str, Any]]) -> bool:
    groups = [group for event in steps for group in event["groups"]]
    return len(groups) == len(set(groups))


if __name__ == "__main__":
    main()
