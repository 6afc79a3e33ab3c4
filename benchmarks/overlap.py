"""What do staleness and streaming buy? Steps an hour and overlap, of four runs a round, interleaved.

    python benchmarks/overlap.py MODEL_FOLDER --rounds 3

Synchronous against asynchronous, each on whole batches and in parts (`train.stream_micro_batches`, with
micro-batches of 32). On whole batches the share of train time in which a rollout generates is 0 when
synchronous, by construction of the run.
"""

import argparse
import random
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
    arms = [(k, streams) for k in (0, 1) for streams in (False, True)]
    rounds = [
        {arm: one(args.model, *arm, args.steps, seed) for arm in random.sample(arms, len(arms))}
        for seed in range(args.rounds)
    ]

    def ratio(over: tuple[int, bool], under: tuple[int, bool]) -> dict[str, float]:
        return spread([each[over]["steps_per_hour"] / each[under]["steps_per_hour"] for each in rounds])

    figures = {
        "workload": f"SmolLM2-135M-Instruct, one-digit + - x, 16 prompts x 8 samples, {args.steps} steps",
        "async_over_sync": ratio((1, False), (0, False)),
        "streamed_over_whole_sync": ratio((0, True), (0, False)),
        "streamed_over_whole_async": ratio((1, True), (1, False)),
        **{
            f"max_staleness_{k}" + ("_streamed" if streams else ""): {
                figure: spread([each[k, streams][figure] for each in rounds])
                for figure in ("steps_per_hour", "overlap_frac", "trainer_wait_s")
            }
            for k, streams in arms
        },
    }
    write("overlap-smollm2", figures)


def one(model: Path, staleness: int, streams: bool, steps: int, seed: int) -> dict[str, Any]:
    """Run once without evaluations; the first step, which fills the pipeline, does not count."""
    mode = "async_off_policy" if staleness else "async_on_policy"
    overrides = [f"run.mode={mode}", f"run.max_staleness={staleness}", f"run.steps={steps}", "eval.every=0"]
    if streams:  # a micro-batch of the whole batch would leave nothing to stream
        overrides += ["train.stream_micro_batches=true", "train.micro_batch_size=32"]
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
