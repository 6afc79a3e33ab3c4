"""What every benchmark shares: where results go, what a result says of its circumstances, spreads."""

import json
import os
import platform
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(each, 2) for each in os.getloadavg()],
    }


def commit() -> str:
    """Return the commit that was measured, marked where the tree was changed."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum, maximum and count."""
    return {
        "median": round(statistics.median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
        "n": len(values),
    }


def circumstances(name: str, *, command: str = "") -> dict[str, Any]:
    """Return what a result begins with: when, of what and on what it was measured.

    Args:
        name: of the benchmark.
        command: that was given; without it, the one of this process.
    """
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("BENCH_COMMIT") or commit(),  # a copy of the tree has no history
        "command": command or shlex.join(["python", _script(), *sys.argv[1:]]),
        "machine": machine(),
    }


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write one result with its circumstances; print it as one line of JSON."""
    record = circumstances(name) | figures
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record), flush=True)
    return path


def run_job(toml: Path, overrides: Sequence[str]) -> tuple[Path, list[dict[str, Any]]]:
    """Run a configuration to its end in a new folder; return the folder and its events."""
    from launcher.settings import load  # noqa: PLC0415 - after the environment is known to be there
    from relax_actor import app  # noqa: PLC0415
    from relax_actor.telemetry import read_events  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp(prefix="relax-bench-"))
    outcome = app.run(load(toml, list(overrides)), folder, run_id=secrets.token_hex(4))
    if outcome.exit_code:
        raise RuntimeError(f"{toml.name} ended with {outcome.exit_code}: {outcome.reason}; see {folder}")
    return folder, read_events(folder / "events.jsonl")[0]


def _script() -> str:
    """Return the script as it is called from the root of the repository."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(HERE.parent)) if path.is_relative_to(HERE) else path.name


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
