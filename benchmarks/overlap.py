"""What does staleness buy? Steps an hour and overlap, synchronous against asynchronous, interleaved.

    python benchmarks/overlap.py MODEL_FOLDER --rounds 3

The share of train time in which a rollout generates is 0 when synchronous, by construction of the run.
"""

import argparse
from pathlib import Path
from typing import Any

from common import run_job, spread, write
from learning import DEMO, job

from launcher.timeline import overlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder that examples/arithmetic/prepare.py made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    rounds = [{k: one(args.model, k, args.steps, seed) for k in (0, 1)} for seed in range(args.rounds)]
    ratios = [each[1]["steps_per_hour"] / each[0]["steps_per_hour"] for each in rounds]
    figures = {
        "workload": f"SmolLM2-135M-Instruct, one-digit + - x, 16 prompts x 8 samples, {args.steps} steps",
        "async_over_sync": spread(ratios),
        **{
            f"max_staleness_{k}": {
                "steps_per_hour": spread([each[k]["steps_per_hour"] for each in rounds]),
                "overlap_frac": spread([each[k]["overlap_frac"] for each in rounds]),
                "trainer_wait_s": spread([each[k]["trainer_wait_s"] for each in rounds]),
            }
            for k in (0, 1)
        },
    }
    write("overlap-smollm2", figures)


def one(model: Path, staleness: int, steps: int, seed: int) -> dict[str, Any]:
    """Run once without evaluations; the first step, which fills the pipeline, does not count."""
    mode = "async_off_policy" if staleness else "async_on_policy"
    overrides = [f"run.mode={mode}", f"run.max_staleness={staleness}", f"run.steps={steps}", "eval.every=0"]
    _, events = run_job(DEMO, [*job(model), f"run.seed={seed}", *overrides])
    done = [event for event in events if event["kind"] == "step"]
    seconds = done[-1]["t"] - done[0]["t"]
    return {
        "steps_per_hour": (len(done) - 1) * 3600 / seconds,
        "overlap_frac": overlap(events) or 0.0,
        "trainer_wait_s": sum(event["wait_s"] for event in done[1:]) / (len(done) - 1),
    }


if __name__ == "__main__":
    main()
