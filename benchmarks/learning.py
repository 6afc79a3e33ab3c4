"""Does the demo learn? Held-out accuracy and reward over wall-clock for several seeds of one setting.

python benchmarks/learning.py MODEL_FOLDER --seeds 0 1 2
"""

import argparse
from pathlib import Path
from typing import Any

from common import RESULTS, run_job, spread, write

DEMO = Path(__file__).resolve().parents[1] / "examples" / "arithmetic" / "arithmetic.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder that examples/arithmetic/prepare.py made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=18)
    args = parser.parse_args()
    runs = [one(args.model, seed, args.steps) for seed in args.seeds]
    figures = {
        "workload": f"SmolLM2-135M-Instruct, one-digit + - x, 16 prompts x 8 samples, {args.steps} steps",
        "held_out_before": spread([run["eval"][0]["accuracy"] for run in runs]),
        "held_out_after": spread([run["eval"][-1]["accuracy"] for run in runs]),
        "seconds": spread([run["seconds"] for run in runs]),
        "runs": runs,
    }
    picture(runs, write("learning-smollm2", figures).with_suffix(".png"))


def job(model: Path) -> list[str]:
    """Return the overrides that point the demo at a prepared model folder."""
    return [
        f"model.path={model}",
        f"data.path={model}/train.jsonl",
        f"data.prefix_path={model}/prefix.txt",
        f"eval.path={model}/heldout.jsonl",
    ]


def one(model: Path, seed: int, steps: int) -> dict[str, Any]:
    """Run one seed; times are seconds since the run started, start-up included."""
    _, events = run_job(DEMO, [*job(model), f"run.seed={seed}", f"run.steps={steps}"])
    start = events[0]["t"]
    steps_done = [event for event in events if event["kind"] == "step"]
    evals = [event for event in events if event["kind"] == "eval"]
    return {
        "seed": seed,
        "seconds": round(events[-1]["t"] - start, 1),
        "reward": [[round(event["t"] - start, 1), round(event["reward_mean"], 4)] for event in steps_done],
        "eval": [
            {
                "step": event["step"],
                "seconds": round(event["t"] - start, 1),
                "accuracy": round(event["mean_reward"], 4),
                "samples": event["samples"],
            }
            for event in evals
        ],
    }


def picture(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw reward (thin) and held-out accuracy (dots) over wall-clock."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the picture

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        line = axes.plot(*zip(*run["reward"], strict=True), alpha=0.5, linewidth=1)[0]
        points = [(point["seconds"], point["accuracy"]) for point in run["eval"]]
        axes.plot(
            *zip(*points, strict=True), "o-", color=line.get_color(), label=f"held out, seed {run['seed']}"
        )
    axes.set(xlabel="wall-clock, s (start-up included)", ylabel="reward / accuracy", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    print(f"picture: {path.relative_to(RESULTS.parents[1])}")


if __name__ == "__main__":
    main()
