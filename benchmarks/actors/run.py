"""Run the actor benchmark: engines interleaved within each test, in a new order each time, several rounds.

    PYTHONPATH=benchmarks python -m actors.run --rounds 3

Each unit (one engine, one test) is a process tree of its own, marked in its environment; afterwards whatever
still bears the mark is counted and killed, and nothing else is. A peer whose environment is missing is named
as absent. One JSON line a unit; all of it with the verdicts goes to benchmarks/results/actors.json.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from common import spread, write

from actors import procfs, table, targets
from actors.deaths import READY
from actors.targets import Row

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"

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
ORPHANS_TIMEOUT_S = 20.0
SETTLE_S = 0.5


def main() -> None:
    """Run every unit of the plan; write and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", default="", help="letters, separated by commas [all]")
    parser.add_argument("--engines", default="", help="names, separated by commas [all]")
    args = parser.parse_args()
    absent = _absent()
    tests, wanted = list(filter(None, args.tests.split(","))), set(filter(None, args.engines.split(",")))
    rows = [
        unit(engine, test, number)
        for number in range(args.rounds)
        for test in tests or GROUPS
        if number == 0 or test not in IN_THE_FIRST_ROUND_ONLY
        for engine in _shuffled(test, wanted, absent)
    ]
    figures = _judged(rows, absent, args.rounds)
    if not (tests or wanted):  # a part of it is for trying, and no result
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
            stdout=subprocess.PIPE if test == "orphan" else output,
            stderr=output,
            text=True,
        )
        if test == "orphan":
            return _orphans(process, mark)
        return _result(process, out, output, test)


def _result(process: "subprocess.Popen[str]", out: Path, log: IO[str], test: str) -> dict[str, Any]:
    """Wait for a unit; return its facts, or why there are none."""
    try:
        code: int | str = process.wait(UNIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = f"killed after {UNIT_TIMEOUT_S:g} s"
    try:
        facts: dict[str, Any] = json.loads(out.read_text())
    except (OSError, ValueError):
        log.seek(0)
        said = log.read().rstrip()
        print(said[-2000:], file=sys.stderr, flush=True)
        return {"errors": {test: f"no result, exit code {code}: {said.rpartition(chr(10))[2][:200]}"}}
    return facts


def _orphans(process: "subprocess.Popen[str]", mark: str) -> dict[str, Any]:
    """Kill the driver of four actors; return when the last process of its tree had ended."""
    ready = any(line.startswith(READY) for line in process.stdout or ())
    orphans = [pid for pid in procfs.marked(mark) if pid != process.pid]
    started = time.perf_counter()
    process.kill()
    gone = procfs.wait_gone(orphans, started, ORPHANS_TIMEOUT_S)
    process.communicate()
    if not ready:
        return {"errors": {"orphan": "its actors did not come up"}}
    facts = {"orphan_processes": len(orphans), "orphan_left": len(orphans) - len(gone), "errors": {}}
    return facts | ({"orphan_gone_s": max(gone.values())} if len(gone) == len(orphans) else {})


def _clear(mark: str) -> int:
    """Kill what a unit left behind, known by its mark; return how many processes that were."""
    time.sleep(SETTLE_S)
    left = procfs.marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def _shuffled(test: str, wanted: set[str], absent: dict[str, str]) -> list[str]:
    engines = [
        engine
        for engine in GROUPS[test]
        if engine.partition("_")[0] not in absent and (not wanted or engine in wanted)
    ]
    random.shuffle(engines)
    return engines


def _absent() -> dict[str, str]:
    """Return the peers that cannot be run here, with the reason."""
    absent = {}
    for peer, module in {"ray": "ray", "xoscar": "xoscar", "monarch": "monarch.actor"}.items():
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
    peer = PEERS / engine.partition("_")[0]
    is_ours = engine.partition("_")[0] in {"ours", "raw", "python"}
    return Path(sys.executable) if is_ours else peer / "bin" / "python"


def _judged(rows: list[Row], absent: dict[str, str], rounds: int) -> dict[str, Any]:
    return {
        "command": f"PYTHONPATH=benchmarks python -m actors.run --rounds {rounds}",
        "rounds": rounds,
        "absent": absent,
        "load": spread([row["load"] for row in rows]),
        "machine_busy_frac": spread([row["machine_busy_frac"] for row in rows]),
        "left_behind": {row["engine"]: row["left_behind"] for row in rows if row["left_behind"]},
        "targets": targets.judge(rows),
        "engines": {engine: _figures(rows, engine) for engine in sorted({row["engine"] for row in rows})},
    }


def _figures(rows: Sequence[Row], engine: str) -> dict[str, Any]:
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
