"""One unit: an engine, a workload, its figures as JSON.

PYTHONPATH=benchmarks python -m rows.harness ENGINE WORKLOAD --out FILE
"""

import argparse
import dataclasses
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors import procfs

from rows.work import Board, Plan

MODULES = {
    "ours": "row_queue",
    "loop": "loop",
    "raw": "raw",
    "mpq": "mpq",
    "ray": "ray_peer",
    "tq": "tq_peer",
}
"""`ours` is `relax_actor.row_queue`; `loop` is the queue of a run, with prompts, rewards and staleness."""

WORKLOADS = {
    "text1": Plan(folder="", producers=1, rows=4096, window=512),
    "text4": Plan(folder="", producers=4, rows=4096, window=512),
    "one": Plan(folder="", producers=1, rows=1024, window=32),
    "media": Plan(folder="", producers=1, rows=256, window=64, warm_rows=64),
}
"""`one` has one put under way at a time, which shows latency; `media` rows are of 10 MB."""

LIMIT_S = 170.0


def main() -> None:
    """Run one unit and write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=MODULES)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relax-bench-", dir="/dev/shm") as folder:
        plan = dataclasses.replace(WORKLOADS[args.workload], folder=folder, media=args.workload == "media")
        facts = unit(args.engine, plan)
    named = {f"{args.workload}_{key}": value for key, value in facts.items() if key != "version"}
    Path(args.out).write_text(json.dumps(named | {"version": facts["version"], "errors": {}}))


def unit(name: str, plan: Plan) -> dict[str, Any]:
    """Run an engine through a plan."""
    engine = importlib.import_module(f"rows.{MODULES[name]}").engine()
    board = Board(plan)
    shared = engine.start(plan)
    try:
        is_well = engine.launch(plan, shared)
        _until(lambda: board.all_ready(plan.producers + 1), is_well)
        board.go()
        _until(lambda: board.consumed >= plan.warm_rows, is_well)
        before, rows = _cpu_s(), board.consumed
        _until(lambda: board.is_done, is_well)
        used, count = _cpu_s() - before, plan.rows - rows
        engine.join()
    finally:
        engine.stop()
    return _figures(plan) | {"cpu_us_row": used / count * 1e6, "version": engine.version}


def _figures(plan: Plan) -> dict[str, Any]:
    consumer = json.loads((Path(plan.folder) / "consumer.json").read_text())
    producers = [
        json.loads((Path(plan.folder) / f"producer{index}.json").read_text())
        for index in range(plan.producers)
    ]
    return {
        "rows_per_s": consumer["rows_per_s"],
        "put_ms": statistics.median(each for producer in producers for each in producer["put_ms"]),
        "get_ms": statistics.median(consumer["get_ms"] or [float("nan")]),
        "age_ms": statistics.median(consumer["age_ms"]),
    } | {
        key: value for end in (producers[0], consumer) for key, value in end.items() if key.startswith("of_")
    }


def _cpu_s() -> float:
    """Return the CPU time of every process of this unit."""
    return procfs.cpu_s(procfs.marked(os.environ[procfs.MARK]))


def _until(holds: Callable[[], bool], is_well: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if not is_well():
            raise RuntimeError("a process of the unit has died")
        if time.monotonic() > deadline:
            raise TimeoutError("the unit takes too long")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
