"""RL with SGLang rollouts and the torch trainer on GPUs, under kills: what they cost, what is lost.

    RELAX_ACTOR_SGLANG_PYTHON=python3 python benchmarks/gpu/sglang_loop.py OUT.json [--parts storm,spare,same]

`storm`: three replicas on one GPU, a trainer on another; the server's scheduler, its main process and
our actor are killed in turn, three times each, while samples are under way. `spare`: one replica, and a
server that waits. `same` (I6): max_staleness 0 and deterministic servers; the samples of a run with three
kills are those of a run without. `experts`: a mixture of experts, on policy, with and without routing
replay (R3). `colocate`: trainer and server take turns on one GPU. `--shape tiny` plays it on a CPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

import sglang_turns  # noqa: E402
from common import circumstances  # noqa: E402
from parts import Parts, cuda_devices  # noqa: E402
from sglang_kills import KINDS, Killer  # noqa: E402
from sglang_runs import ON_GPU, Run, server_words  # noqa: E402
from sglang_scenes import model_folder  # noqa: E402


def main() -> None:
    args = parsed()
    result = circumstances("gpu-sglang-loop") | {"gpus": cuda_devices(), "shape": args.shape}
    parts = Parts(result, args.out)
    args.save = parts.save
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder) / "model", args.shape, context=1024)
        for name in args.parts.split(","):
            found = result[name] = {}
            parts.run(name, lambda name=name, found=found: PARTS[name](Path(folder), args, found))
    print(json.dumps(result))


def storm(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Kill each of three kinds of process so many times."""
    replicas = 3 if ON_GPU else 2
    plan = [(kind, number % replicas) for number, kind in enumerate(KINDS * args.times)]
    run = Run(folder, args, "storm", replicas=replicas, spares=0)
    run.go(Killer(run, plan, others=1, pause_s=3.0))
    found |= run.summary() | {"restarts": run.restarts()}


def spare(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Kill an actor with a server that waits beside it."""
    run = Run(folder, args, "spare", replicas=1, spares=1)
    run.go(Killer(run, [("actor", 0)] * args.times, others=0, pause_s=8.0))
    found |= run.summary() | {"restarts": run.restarts()}


def same(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Sample the same in a calm run and in one with three kills."""
    done: list[Run] = []
    runs = found["runs"] = []
    for name, plan in (("calm", []), ("killed", [(kind, n % 2) for n, kind in enumerate(KINDS)])):
        run = Run(
            folder,
            args,
            name,
            replicas=2 if ON_GPU else 1,
            spares=0,
            run={"steps": 8, "max_staleness": 0},
            rollout={"deterministic": ON_GPU, "update_mode": "abort"}
            | ({"max_new_tokens": 96} if ON_GPU else {}),
            train={"learning_rate": 1e-5, "deterministic": True},
        )
        run.go(Killer(run, plan if ON_GPU else plan[:1], others=0, pause_s=0.0), to_the_end=True)
        done.append(run)
        runs.append(run.summary())
        args.save()
    calm, killed = (run.samples() for run in done)
    found |= {
        "samples": len(calm),
        "same_samples": sum(killed.get(key) == text for key, text in calm.items()),
        "same_in_each_step": same_in_each_step(*done),
        "keys_are_the_same": calm.keys() == killed.keys(),
        "final_weights_are_the_same": runs[0]["weights_xxh3"] == runs[1]["weights_xxh3"],
    }


def same_in_each_step(calm: Run, killed: Run) -> list[dict[str, Any]]:
    """Return what of each step is the same: sampled texts, their log-probs (by what came of them), loss."""
    texts, others = calm.samples(), killed.samples()
    found = []
    for one, other in zip(calm.of("step"), killed.of("step"), strict=False):
        groups = {str(group) for group in one["groups"]}
        keys = [key for key in texts if key.partition("/")[0] in groups]
        found.append(
            {
                "samples": sum(texts[key] == others.get(key) for key in keys),
                "logprobs": one["mismatch_k3"] == other["mismatch_k3"],
                "loss": one["loss"] == other["loss"],
            }
        )
    return found


def experts(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Train a mixture of experts by the experts that SGLang took, and by the trainer's own."""
    shape = "small-moe" if ON_GPU else "tiny-moe"
    model_folder(folder / "moe", shape, context=1024)
    found["shape"] = shape
    for name, fields in (("replayed", {"use_r3": True}), ("own", {})):
        run = Run(
            folder,
            args,
            name,
            replicas=1,
            spares=0,
            run={"steps": 6, "max_staleness": 0},
            model={"path": str(folder / "moe")},
            rollout={
                "sglang_args": (*server_words(), *(("--moe-runner-backend", "triton") if ON_GPU else ()))
            },
            train=fields,
        )
        run.go(Killer(run, [], others=0, pause_s=0.0), to_the_end=True)
        steps = run.of("step")
        found[name] = run.summary() | {
            key: [round(step[key], 5) for step in steps]
            for key in ("mismatch_abs", "mismatch_k3", "max_ratio")
        }
        args.save()


PARTS: dict[str, Callable[[Path, argparse.Namespace, dict[str, Any]], None]] = {
    "storm": storm,
    "spare": spare,
    "same": same,
    "experts": experts,
    "colocate": sglang_turns.measure,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=("tiny", "0.6b"), default="0.6b")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limit-s", type=float, default=200.0, help="of each run")
    parser.add_argument("--times", type=int, default=3 if ON_GPU else 1, help="kills of each kind")
    parser.add_argument("--chunk-tokens", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
