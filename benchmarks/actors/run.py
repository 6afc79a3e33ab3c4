"""Run the actor benchmark: engines interleaved within each test, in a new order each time, several rounds.

    PYTHONPATH=benchmarks python -m actors.run --rounds 3

Each unit (one engine, one test) is a process tree of its own, marked in its environment; afterwards whatever
still bears the mark is counted and killed, and nothing else is. A peer whose environment is missing is named
as absent. One JSON line a unit; all of it with the verdicts goes to benchmarks/results/actors.json.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from common import spread, write

from actors import procfs, table, targets
from actors.deaths import READY
from actors.targets import Row

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"

IMPORTS = {"ray": "ray", "xoscar": "xoscar", "monarch": "monarch.actor"}
"""What each peer's environment must be able to import."""

GROUPS: dict[str, tuple[str, ...]] = {
    "h": ("python", "raw", "ours", "ray", "ray_default", "xoscar", "monarch"),
    "a": ("raw", "ours", "ours_torch", "ray", "xoscar", "monarch"),
    "b": ("raw", "ours", "ray", "xoscar", "monarch"),
    "c": ("raw", "ours", "ray", "xoscar", "monarch"),
    "d": ("raw", "ours", "ray", "xoscar", "monarch"),
    "e": ("raw", "ours", "ray", "xoscar", "monarch"),
    "f": ("raw", "ours", "ray", "xoscar", "monarch", "monarch_tuned"),
    "fbig": ("raw", "ours", "ray", "xoscar"),  # Monarch takes 30 s a death
    "g": ("raw", "ours", "ray", "xoscar", "monarch"),
    "i": ("ours", "ray", "xoscar", "monarch"),
    "orphan": ("ours", "ray", "xoscar", "monarch"),
    "k": ("ours", "ray", "xoscar", "monarch"),
    "s": ("ours", "ray", "xoscar", "monarch"),
    "x": ("ours", "ray", "xoscar", "monarch"),
}
"""The engines that do each test."""

IN_THE_FIRST_ROUND_ONLY = {"k", "s", "x"}
"""Their answer is yes or no."""

SETTINGS = {"monarch_tuned": {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "100ms"}}
"""What the environment of an engine's second name says."""

UNIT_TIMEOUT_S = 180.0
HANG_TIMEOUT_S = 30.0
"""The limit of test s: an engine whose own deadline fails would never end."""

ORPHANS_TIMEOUT_S = 20.0
SETTLE_S = 0.5


def main() -> None:
    """Run every unit of the plan; write what there is after each round, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", default="", help="letters, separated by commas [all]")
    parser.add_argument("--engines", default="", help="names, separated by commas [all]")
    args = parser.parse_args()
    tests, engines = (set(filter(None, each.split(","))) for each in (args.tests, args.engines))
    absent = _absent()
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    for number in range(args.rounds):
        rows += [unit(engine, test, number) for engine, test in _plan(number, tests, engines, absent)]
        figures = _judged(rows, absent, number + 1)
        if not (tests or engines):  # a part of it is for trying, and no result
            write("actors", figures)
    print(table.tables(figures))


def unit(engine: str, test: str, number: int) -> Row:
    """Run one test on one engine; return the row and print it."""
    mark = uuid.uuid4().hex[:12]
    before, load, started = procfs.busy_and_steal(), os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        facts = _run(engine, test, mark, Path(folder))
    total, idle, stolen = (now - then for now, then in zip(procfs.busy_and_steal(), before, strict=True))
    row = {
        "engine": engine,
        "test": test,
        "round": number,
        "load": round(load, 2),
        "machine_busy_frac": round(1 - idle / max(total, 1), 3),
        "steal_frac": round(stolen / max(total, 1), 3),
        "unit_s": round(time.perf_counter() - started, 1),
        "left_behind": _clear(mark),
        "facts": facts,
    }
    print(json.dumps(row), flush=True)
    return row


def _run(engine: str, test: str, mark: str, folder: Path) -> dict[str, Any]:
    out, log = folder / "out.json", folder / "log"
    module = ["actors.cold", engine] if test == "h" else ["actors.harness", engine, "--tests", test]
    environment = os.environ | SETTINGS.get(engine, {}) | {procfs.MARK: mark}
    with log.open("w+") as output:
        process = subprocess.Popen(
            [str(_python(engine)), "-m", *module, "--out", str(out)],
            env=environment,
            stdout=output,
            stderr=output,
            text=True,
        )
        if test == "orphan":
            return _orphans(process, mark, log)
        return _result(process, out, output, test)


def _result(process: "subprocess.Popen[str]", out: Path, log: IO[str], test: str) -> dict[str, Any]:
    """Wait for a unit; return its facts, or why there are none."""
    timeout_s = HANG_TIMEOUT_S if test == "s" else UNIT_TIMEOUT_S
    try:
        code: int | str = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = f"killed after {timeout_s:g} s"
    try:
        facts: dict[str, Any] = json.loads(out.read_text())
    except (OSError, ValueError):
        log.seek(0)
        said = log.read().rstrip()
        print(said[-2000:], file=sys.stderr, flush=True)
        return {"errors": {test: f"no result, exit code {code}: {said.rpartition(chr(10))[2][:200]}"}}
    return facts


def _orphans(process: "subprocess.Popen[str]", mark: str, log: Path) -> dict[str, Any]:
    """Kill the driver of four actors; return when the last process of its tree had ended."""
    ready = _says_ready(process, log)
    orphans = [pid for pid in procfs.marked(mark) if pid != process.pid]
    started = time.perf_counter()
    process.kill()
    gone = procfs.wait_gone(orphans, started, ORPHANS_TIMEOUT_S)
    process.wait()
    if not ready:
        return {"errors": {"orphan": "its actors did not come up"}}
    facts = {"orphan_processes": len(orphans), "orphan_left": len(orphans) - len(gone), "errors": {}}
    return facts | ({"orphan_gone_s": max(gone.values())} if len(gone) == len(orphans) else {})


def _says_ready(process: "subprocess.Popen[str]", log: Path) -> bool:
    deadline = time.perf_counter() + UNIT_TIMEOUT_S
    while process.poll() is None and time.perf_counter() < deadline:
        if READY in log.read_text(errors="replace").splitlines():
            return True
        time.sleep(0.05)
    return False


def _clear(mark: str) -> int:
    """Kill what a unit left behind, known by its mark; return how many processes that were."""
    time.sleep(SETTLE_S)
    return procfs.clear(mark)


def _plan(
    number: int, tests: set[str], engines: set[str], absent: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield a round's units: test by test, its engines in a new order."""
    for test, able in GROUPS.items():
        if (tests and test not in tests) or (number and test in IN_THE_FIRST_ROUND_ONLY):
            continue
        present = [each for each in able if _family(each) not in absent and (not engines or each in engines)]
        yield from ((engine, test) for engine in random.sample(present, len(present)))


def _absent() -> dict[str, str]:
    """Return the peers that cannot be run here, with the reason."""
    absent = {}
    for peer, module in IMPORTS.items():
        if not _python(peer).exists():
            absent[peer] = "its environment is missing: `make bench-actors` makes it"
            continue
        tried = subprocess.run(
            [str(_python(peer)), "-c", f"import {module}"], capture_output=True, text=True, check=False
        )
        if tried.returncode:
            absent[peer] = f"cannot be imported: {(tried.stderr.splitlines() or ['?'])[-1]}"
    for peer, reason in absent.items():
        print(f"absent: {peer}: {reason}", file=sys.stderr, flush=True)
    return absent


def _python(engine: str) -> Path:
    """Return the interpreter that has the engine: a peer's own, or this one."""
    has_peer = _family(engine) in IMPORTS
    return PEERS / _family(engine) / "bin" / "python" if has_peer else Path(sys.executable)


def _family(engine: str) -> str:
    return engine.partition("_")[0]


def _judged(rows: list[Row], absent: dict[str, str], rounds: int) -> dict[str, Any]:
    return {
        "command": f"make bench-actors ROUNDS={rounds}",
        "rounds": rounds,
        "absent": absent,
        "load": spread([row["load"] for row in rows]),
        "machine_busy_frac": spread([row["machine_busy_frac"] for row in rows]),
        "left_behind": {row["engine"]: row["left_behind"] for row in rows if row["left_behind"]},
        "targets": targets.judge(rows),
        "engines": {engine: figures_of(rows, engine) for engine in sorted({row["engine"] for row in rows})},
    }


def figures_of(rows: Sequence[Row], engine: str) -> dict[str, Any]:
    """Return an engine's metrics with their spread over all rounds, its texts and its errors."""
    own = [row["facts"] for row in rows if row["engine"] == engine]
    metrics = sorted(
        {key for facts in own for key, value in facts.items() if isinstance(value, list | int | float)}
    )
    values = {metric: targets.samples(rows, engine, metric) for metric in metrics}
    return {
        "version": next((facts["version"] for facts in own if facts.get("version")), ""),
        "metrics": {
            metric: spread(found) | {"p99": round(targets.p99(found), 6)}
            for metric, found in values.items()
            if found
        },
        "facts": {
            key: value
            for facts in own
            for key, value in facts.items()
            if isinstance(value, str) and key != "version"
        },
        "errors": {key: value for facts in own for key, value in facts.get("errors", {}).items()},
    }


if __name__ == "__main__":
    main()
