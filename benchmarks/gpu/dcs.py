"""Policy versions between GPUs: what publishing adds to a step, how soon a replica has them, what kills cost.

    NCCL_NVLS_ENABLE=0 python benchmarks/gpu/dcs.py OUT.json [--rehearse]

The trainer is on GPU 0, the replica on the last one. Yardsticks are in the same run: a copy over NVLink and
out of page-locked memory by the same process that stages. `--rehearse` plays it without a GPU, for its course
only. Every part runs whatever became of the others; what failed, or had no time left, is in the result.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

from actors.targets import Target, judge  # noqa: E402
from common import circumstances, spread  # noqa: E402
from dcs_storm import Storm, storm  # noqa: E402
from gpu_bench import STEP_TOKENS, BenchReplica, BenchStore, BenchTrainer  # noqa: E402
from parts import Parts  # noqa: E402

from relax_actor import Backoff, ChildSpec, Intensity, Supervisor, SupervisorSpec  # noqa: E402
from relax_actor.dcs.routes import Route  # noqa: E402

REHEARSAL = "--rehearse" in sys.argv
OUT = Path(sys.argv[1])
MODELS = ("tiny",) if REHEARSAL else ("4b", "1.7b")
STORM = Storm(2.0, 12.0, 3.0) if REHEARSAL else Storm(20.0, 30.0, 5.0)
BLOCKS, STEPS = (2, 3) if REHEARSAL else (3, 4)
INSTALLS = 6
BUCKET_BYTES = (32 << 10) if REHEARSAL else (512 << 20)
CEILING_BYTES = 4 << 30
ENDS_S = time.monotonic() + 165  # the machine is lent by the minute
NEEDED_S = {"install": 25, "publish": 22, "storm": STORM.calm_s + STORM.storm_s + 8, "1.7b": 30}
"""Parts that are not begun where less time is left."""

FIRST = MODELS[0]
TARGETS = (
    Target(what="publishing adds to a step, share", metric="publish_added_frac", limit=0.02, engine=FIRST),
    Target(what="installed over NVLink, s", metric="cuda_ipc_install_s", limit=0.1, engine=FIRST),
    Target(
        what="transfer over NVLink, GB/s", metric="cuda_ipc_gb_s", limit=300.0, at_least=True, engine=FIRST
    ),
    Target(what="installed from page-locked memory, s", metric="pinned_install_s", limit=0.3, engine=FIRST),
    Target(
        what="the same, whole install, times a plain copy",
        metric="pinned_gb_s",
        limit=0.8,
        at_least=True,
        engine=FIRST,
        against="ceilings",
    ),
    Target(what="storm changes a trainer's step by, share", metric="storm_frac", limit=0.02, engine=FIRST),
    Target(
        what="storm leaves the trainer's process",
        metric="trainer_stays",
        limit=1,
        at_least=True,
        engine=FIRST,
    ),
)

CEILINGS = {Route.CUDA_IPC: "nvlink_gb_s", Route.PINNED: "host_to_gpu_gb_s"}

result = circumstances("gpu-dcs", command="NCCL_NVLS_ENABLE=0 python benchmarks/gpu/dcs.py OUT.json")
parts = Parts(result, OUT)


def main() -> None:
    part("gpus", lambda: result.update(gpus=gpus(), shm_gib=shm_gib()))
    for model in MODELS:
        part(model, lambda model=model: measure(model))
    print(json.dumps(result))


def part(name: str, run: Callable[[], object]) -> None:
    """Run a part if there is time for it, and keep what there is."""
    left_s = ENDS_S - time.monotonic()
    if left_s < NEEDED_S.get(name.rpartition(" ")[2], 5):
        parts.skip(name, f"only {left_s:.0f} s were left")
    else:
        parts.run(name, run)
    result["targets"] = judge([row for model in MODELS for row in rows(model)], TARGETS)
    parts.save()


def rows(model: str) -> list[dict[str, Any]]:
    """Return what the targets judge by, as far as it was measured."""
    figures = result.get(model, {})
    installed, storm_, step = (figures.get(key, {}) for key in ("install", "storm", "step"))
    facts = {"publish_added_frac": step.get("added_frac"), "storm_frac": None, "trainer_stays": None}
    if storm_:
        facts["storm_frac"] = abs(storm_["change_frac"])
        facts["trainer_stays"] = int(storm_["trainer_pid_unchanged"])
    for route, rate in ((Route.CUDA_IPC, "transfer_gb_s"), (Route.PINNED, "whole_gb_s")):
        row = installed.get(route, {})
        facts[f"{route}_install_s"] = (row.get("later_s") or {}).get("median")
        value = row.get(rate)
        facts[f"{route}_gb_s"] = value["median"] if isinstance(value, dict) else value
    limits = result.get("ceilings", {})
    ceilings_ = {"cuda_ipc_gb_s": limits.get("nvlink_gb_s"), "pinned_gb_s": limits.get("host_to_gpu_gb_s")}
    return [
        {"engine": model, "round": 0, "facts": facts},
        {"engine": "ceilings", "round": 0, "facts": ceilings_ if model == FIRST else {}},
    ]


def shm_gib() -> float:
    """Return how much shared memory the machine gives."""
    limits = os.statvfs("/dev/shm")  # noqa: S108 - that is where shared memory is
    return round(limits.f_blocks * limits.f_frsize / 2**30, 1)


def gpus() -> list[str]:
    if REHEARSAL:
        return []
    import pynvml  # noqa: PLC0415 - not where there is no driver

    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    return [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]


def measure(model: str) -> None:
    kind, last = "cuda", max(len(result.get("gpus", [])) - 1, 0)
    if REHEARSAL:
        folder = OUT.parent / "gpus"
        folder.mkdir(exist_ok=True)
        kind = f"fake:{folder}"

    def child(name: str, actor: type, gpu: str, **args: object) -> ChildSpec:
        env = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        args = {"kind": kind, **args}
        return ChildSpec(id=name, actor=actor, args=args, env=env, zygote="torch", start_timeout_s=120.0)

    children = (
        child("store", BenchStore, "", slot_bytes=BUCKET_BYTES),
        child("trainer", BenchTrainer, "0", model=model, bucket_bytes=BUCKET_BYTES),
        child("replica", BenchReplica, str(last), model=model),
    )
    spec = SupervisorSpec(
        id="bench",
        backoff=Backoff(base_s=0.001, cap_s=0.01),
        intensity=Intensity(restarts=1000),  # each kill of the storm is a restart
        children=children,
    )
    figures = result[model] = {}
    with Supervisor(spec, zygotes={"default": (), "torch": ("torch",)}, stop_total_s=8.0) as tree:
        tree.wait_ready(60.0)
        if "ceilings" not in result:
            part(f"{model} ceilings", lambda: ceilings(tree))
        part(f"{model} install", lambda: installs(tree, figures))
        part(f"{model} publish", lambda: figures.update(step=publishing(tree, model)))
        if model == FIRST:
            part(f"{model} storm", lambda: figures.update(storm=storm(tree, STORM)))


def ceilings(tree: Supervisor) -> None:
    store = tree.ref("store", BenchStore).within(60)
    result["ceilings"] = rounded(store.ask(BenchStore.ceilings, CEILING_BYTES).result())


def installs(tree: Supervisor, figures: dict[str, Any]) -> None:
    """Publish and install by each route; the first install by each opens what later ones use again."""
    figures["install"] = {route: installed(tree, route) for route in (Route.CUDA_IPC, Route.PINNED)}
    said = tree.ref("trainer", BenchTrainer).within(40).ask(BenchTrainer.said).result()
    figures["nbytes"], figures["buckets"] = int(said[-1]["nbytes"]), int(said[-1]["buckets"])
    staged = tree.ref("store", BenchStore).within(20).ask(BenchStore.said).result()
    for route, row in figures["install"].items():
        figures["install"][route] |= rates(
            row, route, [each for each in staged if each["route"] == route], said[-1]["nbytes"]
        )
    figures["published"] = {
        "first_s": rounded(said[0]),
        "second_s": rounded(said[1]),
        "visible_s": spread([each["seconds"] for each in said[2:]]),
        "in_host_s": spread([each["copied_s"] for each in said[2:]]),
        "on_gpu": all(each["on_gpu"] for each in said),
    }


def installed(tree: Supervisor, route: Route) -> dict[str, Any]:
    """Publish and install by one route, some times; compare the weights of the first and the last."""
    trainer = tree.ref("trainer", BenchTrainer).within(40)
    replica = tree.ref("replica", BenchReplica).within(20)
    times: list[float] = []
    errors: list[str] = []
    exact = []
    for round_ in range(INSTALLS):
        version = trainer.ask(BenchTrainer.publish_next).result()
        time.sleep(0.4)  # the store has page-locked what is new by then, as it has between two real steps
        try:
            times.append(replica.ask(BenchReplica.timed, version, route).result())
        except Exception as error:  # noqa: BLE001 - part of the result
            errors.append(str(error)[:500])
            continue
        if round_ in {0, INSTALLS - 1}:
            mine, theirs = trainer.ask(BenchTrainer.sums), replica.ask(BenchReplica.sums)
            exact.append(mine.result() == theirs.result())
    return {
        "first_s": round(times[0], 5) if times else None,
        "later_s": spread(times[1:]) if times[1:] else None,
        "bit_exact": exact,
        "errors": errors,
    }


def rates(row: dict[str, Any], route: Route, staged: list[dict[str, Any]], nbytes: float) -> dict[str, Any]:
    """Return GB/s of a route's transfers and of its installs, and their shares of a plain copy's."""
    moved = [each["nbytes"] / each["copying_s"] / 1e9 for each in staged if each["copying_s"]]
    transfer = spread(moved[1:]) if moved[1:] else None
    found = {
        "transfer_gb_s": transfer,
        "failures": [each["failure"] for each in staged if each["failure"]],
    }
    limit = result.get("ceilings", {}).get(CEILINGS[route])
    if row["later_s"]:
        found["whole_gb_s"] = round(nbytes / row["later_s"]["median"] / 1e9, 1)
    if row["later_s"] and transfer and limit:
        found["transfer_of_ceiling"] = round(transfer["median"] / limit, 3)
        found["whole_of_ceiling"] = round(found["whole_gb_s"] / limit, 3)
    return found


def publishing(tree: Supervisor, model: str) -> dict[str, Any]:
    """Return what a step takes with and without publishing."""
    trainer = tree.ref("trainer", BenchTrainer).within(60)
    times = trainer.ask(BenchTrainer.interleaved, BLOCKS, STEPS).result()
    with_s, without_s = (statistics.median(times[key]) for key in ("with", "without"))
    return {
        "tokens": STEP_TOKENS[model],
        "without_s": spread(times["without"]),
        "with_s": spread(times["with"]),
        "call_s": spread(times["call"]),
        "added_frac": round(with_s / without_s - 1, 5),
        "waited_s": max(each["waited_s"] for each in trainer.ask(BenchTrainer.said).result()),
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 5) for key, value in values.items()}


if __name__ == "__main__":
    main()
