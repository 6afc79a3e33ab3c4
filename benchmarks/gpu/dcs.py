"""Policy versions between GPUs: what publishing adds to a step, how soon a replica has them, what kills cost.

    NCCL_NVLS_ENABLE=0 python benchmarks/gpu/dcs.py OUT.json [--rehearse]

The trainer is on GPU 0, the replica on the last one. Yardsticks are in the same run: a copy over NVLink and
out of page-locked memory by the same process that stages. `--rehearse` plays it without a GPU, for its course
only. Every part runs whatever became of the others; what failed is in the result.
"""

import contextlib
import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

from common import commit, machine, spread  # noqa: E402
from gpu_bench import QWEN3, BenchReplica, BenchStore, BenchTrainer  # noqa: E402

from relax_actor import Backoff, ChildSpec, Supervisor, SupervisorSpec  # noqa: E402
from relax_actor.dcs.routes import Route  # noqa: E402

REHEARSAL = "--rehearse" in sys.argv
OUT = Path(sys.argv[1])
MODELS = ("tiny",) if REHEARSAL else ("1.7b", "4b")
STORM_MODEL = MODELS[0]
STORM_S, KILL_EVERY_S = (3.0, 1.0) if REHEARSAL else (30.0, 5.0)
BLOCKS, STEPS = (2, 3) if REHEARSAL else (3, 5)
INSTALLS = 5
BUCKET_BYTES = (32 << 10) if REHEARSAL else (512 << 20)
DEADLINE_S = time.monotonic() + 225  # the machine is lent by the minute

result: dict[str, Any] = {
    "benchmark": "gpu-dcs",
    "date": time.strftime("%Y-%m-%d"),
    "commit": os.environ.get("BENCH_COMMIT") or commit(),
    "command": "NCCL_NVLS_ENABLE=0 python benchmarks/gpu/dcs.py OUT.json",
    "machine": machine(),
    "errors": [],
}


def main() -> None:
    part("gpus", lambda: result.update(gpus=gpus()))
    for model in MODELS:
        part(model, lambda model=model: measure(model))
    print(json.dumps(result))


def part(name: str, run: Any) -> None:
    """Run a part, and keep what there is."""
    started = time.monotonic()
    print(f"-- {name}", file=sys.stderr, flush=True)
    if time.monotonic() > DEADLINE_S:
        result["errors"].append(f"{name}: no time left")
    else:
        try:
            run()
        except BaseException:  # noqa: BLE001 - the others go on
            result["errors"].append(f"{name}: {traceback.format_exc()[-1500:]}")
            print(traceback.format_exc(), file=sys.stderr, flush=True)
    print(f"-- {name} took {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")


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
    quick = Backoff(base_s=0.001, cap_s=0.01)
    spec = SupervisorSpec(id="bench", backoff=quick, children=children)
    figures = result[model] = {}
    with Supervisor(spec, zygotes={"default": (), "torch": ("torch",)}) as tree:
        tree.wait_ready(120.0)
        part(f"{model} ceilings", lambda: ceilings(tree, figures))
        part(f"{model} install", lambda: installs(tree, figures))
        part(f"{model} publish", lambda: publishing(tree, figures))
        if model == STORM_MODEL:
            part(f"{model} storm", lambda: storm(tree, figures))


def ceilings(tree: Supervisor, figures: dict[str, Any]) -> None:
    store = tree.ref("store", BenchStore).within(300)
    figures["ceilings"] = rounded(store.ask(BenchStore.ceilings, 4 << 30).result())


def installs(tree: Supervisor, figures: dict[str, Any]) -> None:
    """Publish, install by one route, compare; the first install by each opens what later ones use again."""
    trainer = tree.ref("trainer", BenchTrainer).within(300)
    replica = tree.ref("replica", BenchReplica).within(120)
    store = tree.ref("store", BenchStore).within(60)
    figures["install"] = {}
    for route in (Route.CUDA_IPC, Route.PINNED):
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
                mine, theirs = (
                    tree.ref(name, actor).within(120).ask(actor.sums).result()
                    for name, actor in (("trainer", BenchTrainer), ("replica", BenchReplica))
                )
                exact.append(mine == theirs)
        figures["install"][route] = {
            "first_s": round(times[0], 5) if times else None,
            "later_s": spread(times[1:]) if times[1:] else None,
            "bit_exact": exact,
            "errors": errors,
        }
    said = trainer.ask(BenchTrainer.said).result()
    nbytes = said[-1]["nbytes"]
    figures["nbytes"], figures["buckets"] = int(nbytes), int(said[-1]["buckets"])
    staged = store.ask(BenchStore.said).result()
    for route, row in figures["install"].items():
        rates = [
            each["nbytes"] / each["copying_s"] / 1e9
            for each in staged
            if each["route"] == route and each["copying_s"]
        ]
        row["transfer_gb_s"] = spread(rates[1:]) if rates[1:] else None
        row["failures"] = [each["failure"] for each in staged if each["route"] == route and each["failure"]]
        if row["later_s"]:
            row["whole_gb_s"] = round(nbytes / row["later_s"]["median"] / 1e9, 1)
    figures["published"] = {
        "first_s": rounded(said[0]),
        "second_s": rounded(said[1]),
        "visible_s": spread([each["seconds"] for each in said[2:]]),
        "in_host_s": spread([each["copied_s"] for each in said[2:]]),
        "on_gpu": all(each["on_gpu"] for each in said),
    }


def publishing(tree: Supervisor, figures: dict[str, Any]) -> None:
    trainer = tree.ref("trainer", BenchTrainer).within(600)
    times = trainer.ask(BenchTrainer.interleaved, BLOCKS, STEPS).result()
    with_s, without_s = (statistics.median(times[key]) for key in ("with", "without"))
    figures["step"] = {
        "tokens": QWEN3[figures_name(figures)][-1],
        "without_s": spread(times["without"]),
        "with_s": spread(times["with"]),
        "call_s": spread(times["call"]),
        "added_frac": round(with_s / without_s - 1, 5),
        "waited_s": max(each["waited_s"] for each in trainer.ask(BenchTrainer.said).result()),
    }


def storm(tree: Supervisor, figures: dict[str, Any]) -> None:
    """Train for a while with the replica following, then as long with the replica killed now and then."""
    trainer = tree.ref("trainer", BenchTrainer).within(600)
    replica = tree.ref("replica", BenchReplica).within(60)
    replica.ask(BenchReplica.follow).result()
    pid = tree.pid("trainer")
    calm = trainer.ask(BenchTrainer.train, STORM_S).result()
    calm_installs = replica.ask(BenchReplica.followed).result()
    stop, kills = threading.Event(), []

    def kill() -> None:
        while not stop.wait(KILL_EVERY_S):
            with contextlib.suppress(Exception):
                os.kill(tree.pid("replica") or 0, signal.SIGKILL) if tree.pid("replica") else None
                kills.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    wild = trainer.ask(BenchTrainer.train, STORM_S).result()
    stop.set()
    killer.join()
    installs_after = None
    with contextlib.suppress(Exception):
        installs_after = replica.ask(BenchReplica.followed).result()
    figures["storm"] = {
        "seconds_each": STORM_S,
        "kills": len(kills),
        "calm_step_s": spread(calm),
        "storm_step_s": spread(wild),
        "change_frac": round(statistics.median(wild) / statistics.median(calm) - 1, 5),
        "trainer_pid_unchanged": tree.pid("trainer") == pid,
        "installs_in_calm": len(calm_installs),
        "install_in_calm_s": spread([each[2] for each in calm_installs]) if calm_installs else None,
        "installs_of_last_incarnation": installs_after,
    }


def figures_name(figures: dict[str, Any]) -> str:
    return next(model for model in MODELS if result.get(model) is figures)


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 5) for key, value in values.items()}


if __name__ == "__main__":
    main()
