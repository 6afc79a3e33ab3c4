"""Run the queue benchmark: engines interleaved within each workload, in a new order each time.

    PYTHONPATH=benchmarks python -m rows.run --rounds 3

One unit (one engine, one workload) is a process tree of its own, as in `actors.run`. One JSON line a unit;
all of it with the verdicts goes to benchmarks/results/queue.json.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from actors import procfs
from actors.run import figures_of
from actors.targets import Row, judge
from common import write

from rows.harness import MODULES, WORKLOADS
from rows.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"
OWN_ENVIRONMENT = {"ray", "tq"}
UNIT_LIMIT_S = 200.0


def main() -> None:
    """Run every unit of the plan; write what there is after each round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default="", help="names, separated by commas [all]")
    parser.add_argument("--engines", default="", help="names, separated by commas [all]")
    args = parser.parse_args()
    workloads = args.workloads.split(",") if args.workloads else list(WORKLOADS)
    engines = args.engines.split(",") if args.engines else list(MODULES)
    absent = {each for each in engines if not _python(each).exists()}
    rows: list[Row] = []
    for number in range(args.rounds):
        rows += [unit(engine, it, number) for engine, it in _plan(workloads, {*engines} - absent)]
        if not (args.workloads or args.engines):  # a part of it is for trying, and no result
            write("queue", _judged(rows, absent, number + 1))
    for verdict in judge(rows, TARGETS):
        print(f"{verdict['what']}: {verdict['measured']} (limit {verdict['limit']}), met: {verdict['met']}")


def unit(engine: str, workload: str, number: int) -> Row:
    """Run one workload on one engine; return the row and print it."""
    mark, load = uuid.uuid4().hex[:12], os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        out = Path(folder) / "out.json"
        said = _ended(engine, workload, out, mark)
        facts = json.loads(out.read_text()) if out.exists() else {"errors": {workload: said}}
    row = {"engine": engine, "test": workload, "round": number, "load": round(load, 2), "facts": facts}
    print(json.dumps(row), flush=True)
    return row


def _ended(engine: str, workload: str, out: Path, mark: str) -> str:
    """Run a unit to its end, kill what it left; return the last line it said."""
    command = [str(_python(engine)), "-m", "rows.harness", engine, workload, "--out", str(out)]
    paths = f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}"
    environment = os.environ | {procfs.MARK: mark, "PYTHONPATH": paths}
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=UNIT_LIMIT_S
        )
        said = ended.stderr.rstrip().rpartition("\n")[2][:200]
    except subprocess.TimeoutExpired:
        said = f"killed after {UNIT_LIMIT_S:g} s"
    procfs.clear(mark)
    return said


def _plan(workloads: Iterable[str], engines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for workload in workloads:
        ordered = sorted(engines)
        yield from ((engine, workload) for engine in random.sample(ordered, len(ordered)))


def _python(engine: str) -> Path:
    return PEERS / engine / "bin" / "python" if engine in OWN_ENVIRONMENT else Path(sys.executable)


def _judged(rows: list[Row], absent: set[str], rounds: int) -> dict[str, Any]:
    return {
        "command": f"make bench-queue ROUNDS={rounds}",
        "rounds": rounds,
        "absent": sorted(absent),
        "targets": judge(rows, TARGETS),
        "engines": {engine: figures_of(rows, engine) for engine in sorted({row["engine"] for row in rows})},
    }


if __name__ == "__main__":
    main()
