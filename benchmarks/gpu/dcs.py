"""Policy versions between GPUs: what publishing adds to a step, how soon a replica has them, what kills cost.

    NCCL_NVLS_ENABLE=0 python benchmarks/gpu/dcs.py OUT.json [--rehearse]

The trainer is on GPU 0, the replica on the last one. Yardsticks are in the same run: a copy over NVLink and
out of page-locked memory by the same process that stages. `--rehearse` plays it without a GPU, for its course
only. Every part runs whatever became of the others; what failed, or had no time left, is in the result.
"""

import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

from actors.targets import Target, judge  # noqa: E402
from common import commit, machine, spread  # noqa: E402
from gpu_bench import QWEN3, BenchReplica, BenchStore, BenchTrainer  # noqa: E402

from relax_actor import Backoff, ChildSpec, Intensity, Supervisor, SupervisorSpec  # noqa: E402
from relax_actor.dcs.routes import Route  # noqa: E402
from relax_actor.errors import RelaxError  # noqa: E402

REHEARSAL = "--rehearse" in sys.argv
OUT = Path(sys.argv[1])
MODELS = ("tiny",) if REHEARSAL else ("4b", "1.7b")
STORM_MODEL = MODELS[0]
CALM_S, STORM_S, KILL_EVERY_S = (2.0, 12.0, 3.0) if REHEARSAL else (20.0, 30.0, 5.0)
BLOCKS, STEPS = (2, 3) if REHEARSAL else (3, 4)
INSTALLS = 6
BUCKET_BYTES = (32 << 10) if REHEARSAL else (512 << 20)
CEILING_BYTES = 4 << 30
ENDS_S = time.monotonic() + 165  # the machine is lent by the minute
NEEDED_S = {"install": 25, "publish": 22, "storm": CALM_S + STORM_S + 8, "1.7b": 30}
"""Parts that are not begun where less time is left."""

TARGETS = (
    Target(
        what="publishing adds to a step, share", metric="publish_added_frac", limit=0.02, engine=MODELS[0]
    ),
    Target(what="installed over NVLink, s", metric="cuda_ipc_install_s", limit=0.1, engine=MODELS[0]),
    Target(
        what="transfer over NVLink, GB/s",
        metric="cuda_ipc_gb_s",
        limit=300.0,
        at_least=True,
        engine=MODELS[0],
    ),
    Target(
        what="installed from page-locked memory, s", metric="pinned_install_s", limit=0.3, engine=MODELS[0]
    ),
    Target(
        what="the same, whole install, times a plain copy",
        metric="pinned_gb_s",
        limit=0.8,
        at_least=True,
        engine=MODELS[0],
        against="ceilings",
    ),
    Target(
        what="storm changes a trainer's step by, share", metric="storm_frac", limit=0.02, engine=MODELS[0]
    ),
    Target(
        what="storm leaves the trainer's process",
        metric="trainer_stays",
        limit=1,
        at_least=True,
        engine=MODELS[0],
    ),
)

CEILINGS = {Route.CUDA_IPC: "nvlink_gb_s", Route.PINNED: "host_to_gpu_gb_s"}

result: dict[str, Any] = {
    "benchmark": "gpu-dcs",
    "date": time.strftime("%Y-%m-%d"),
    "commit": os.environ.get("BENCH_COMMIT") or commit(),
    "command": "NCCL_NVLS_ENABLE=0 python benchmarks/gpu/dcs.py OUT.json",
    "machine": machine(),
    "errors": [],
}


def main() -> None:
    part("gpus", lambda: result.update(gpus=gpus(), shm_gib=shm_gib()))
    for model in MODELS:
        part(model, lambda model=model: measure(model))
    print(json.dumps(result))


def part(name: str, run: Any) -> None:
    """Run a part if there is time for it, and keep what there is."""
    started = time.monotonic()
    print(f"-- {name}", file=sys.stderr, flush=True)
    left_s = ENDS_S - started
    if left_s < NEEDED_S.get(name.rpartition(" ")[2], 5):
        result["errors"].append(f"{name}: only {left_s:.0f} s were left")
    else:
        try:
            run()
        except BaseException:  # noqa: BLE001 - the others go on
            result["errors"].append(f"{name}: {traceback.format_exc()[-1500:]}")
            print(traceback.format_exc(), file=sys.stderr, flush=True)
    print(f"-- {name} took {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    result["targets"] = judge([row for model in MODELS for row in rows(model)], TARGETS)
    OUT.write_text(json.dumps(result, indent=1) + "\n")  # a cut-off run keeps its parts


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
        {"engine": "ceilings", "round": 0, "facts": ceilings_ if model == MODELS[0] else {}},
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
        part(f"{model} publish", lambda: publishing(tree, figures))
        if model == STORM_MODEL:
            part(f"{model} storm", lambda: storm(tree, figures))


def ceilings(tree: Supervisor) -> None:
    store = tree.ref("store", BenchStore).within(60)
    result["ceilings"] = rounded(store.ask(BenchStore.ceilings, CEILING_BYTES).result())


def installs(tree: Supervisor, figures: dict[str, Any]) -> None:
    """Publish, install by one route, compare; the first install by each opens what later ones use again."""
    trainer = tree.ref("trainer", BenchTrainer).within(40)
    replica = tree.ref("replica", BenchReplica).within(20)
    store = tree.ref("store", BenchStore).within(20)
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
                    tree.ref(name, actor).within(20).ask(actor.sums).result()
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
        limit = result.get("ceilings", {}).get(CEILINGS[route])
        if row["later_s"]:
            row["whole_gb_s"] = round(nbytes / row["later_s"]["median"] / 1e9, 1)
        if row["later_s"] and row["transfer_gb_s"] and limit:
            row["transfer_of_ceiling"] = round(row["transfer_gb_s"]["median"] / limit, 3)
            row["whole_of_ceiling"] = round(row["whole_gb_s"] / limit, 3)
    figures["published"] = {
        "first_s": rounded(said[0]),
        "second_s": rounded(said[1]),
        "visible_s": spread([each["seconds"] for each in said[2:]]),
        "in_host_s": spread([each["copied_s"] for each in said[2:]]),
        "on_gpu": all(each["on_gpu"] for each in said),
    }


def publishing(tree: Supervisor, figures: dict[str, Any]) -> None:
    trainer = tree.ref("trainer", BenchTrainer).within(60)
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
    trainer = tree.ref("trainer", BenchTrainer).within(CALM_S + STORM_S)
    replica = tree.ref("replica", BenchReplica).within(10)
    replica.ask(BenchReplica.follow).result()
    pid = tree.pid("trainer")
    calm = trainer.ask(BenchTrainer.train, CALM_S).result()
    calm_installs = replica.ask(BenchReplica.followed).result()
    training = trainer.ask(BenchTrainer.train, STORM_S)
    started = time.monotonic()
    kills = []
    while (next_s := started + KILL_EVERY_S * (len(kills) + 1)) < started + STORM_S:
        time.sleep(max(0.0, next_s - time.monotonic()))
        kills.append(kill(tree, replica, until_s=next_s + 0.9 * KILL_EVERY_S))
    wild = training.result()
    figures["storm"] = {
        "calm_seconds": CALM_S,
        "storm_seconds": STORM_S,
        "calm_step_s": spread(calm),
        "storm_step_s": spread(wild),
        "change_frac": round(statistics.median(wild) / statistics.median(calm) - 1, 5),
        "trainer_pid_unchanged": tree.pid("trainer") == pid,
        "installs_in_calm": len(calm_installs),
        "install_in_calm_s": spread([seconds for _, _, seconds, _ in calm_installs])
        if calm_installs
        else None,
        "kills": kills,
        "current_again_s": current_again(kills),
    }


def kill(tree: Supervisor, replica: Any, until_s: float) -> dict[str, Any]:
    """Kill the replica; return how soon its next incarnation has the current version, and by which route."""
    pid = tree.pid("replica")
    if pid is None:
        return {"failure": "there was no replica to kill"}
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    failure = "nothing was installed in time"
    while time.monotonic() < until_s:
        try:
            installs_ = replica.within(2).ask(BenchReplica.followed).result()
        except RelaxError as error:  # it is not there again
            failure = str(error)
        else:
            for version, route, seconds, at in installs_:
                if at > killed and not route.startswith("failed"):
                    again = {"current_again_s": round(at - killed, 4), "install_s": round(seconds, 4)}
                    return {**again, "route": route, "version": version}
                failure = route
        time.sleep(0.02)
    return {"failure": failure[:300]}


def current_again(kills: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of seconds from kill to current version, by route."""
    by_route = defaultdict(list)
    for row in kills:
        if "route" in row:
            by_route[row["route"]].append(row["current_again_s"])
    return {route: spread(values) for route, values in by_route.items()}


def figures_name(figures: dict[str, Any]) -> str:
    return next(model for model in MODELS if result.get(model) is figures)


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 5) for key, value in values.items()}


if __name__ == "__main__":
    main()
