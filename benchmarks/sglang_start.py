"""How long a server of the engine `sglang` takes to start: quickly, and as SGLang starts by itself.

    RELAX_ACTOR_SGLANG_PYTHON=.venv-sglang/bin/python python benchmarks/sglang_start.py [--rounds 3]

Both kinds in turns; each round starts a server, waits for its first token and kills it. On a machine with a
GPU the server is on GPU `--gpu`. `--imports` adds one quick start that says where the imports' time goes, by
package; it is slower itself. What was not compiled or cached is paid for by a start that does not count.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import psutil  # noqa: E402
from common import spread, write  # noqa: E402
from sglang_scenes import SHAPES, Told, model_folder, server_options, start_engine  # noqa: E402

KINDS = {"quick": True, "plain": False}
SLOWEST = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--imports", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_folder(folder / "model", args.shape)
        write("sglang_start", measured(folder, args))


def measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Start servers of each kind in turns."""
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in args.kinds}
    started(folder, args, "cold", quick_start="quick" in args.kinds)
    for number in range(args.rounds):
        for kind in args.kinds:
            row = started(folder, args, f"{kind}-{number}", quick_start=KINDS[kind])
            sys.stderr.write(f"{kind}: {row}\n")
            rows[kind].append(row)
    figures: dict[str, Any] = {
        kind: {
            "seconds": spread([row["seconds"] for row in found]),
            "cpu_s": spread([row["cpu_s"] for row in found]),
            "rounds": found,
        }
        for kind, found in rows.items()
    }
    if args.imports:
        env = {**server_options()["sglang_env"], "PYTHONPROFILEIMPORTTIME": "1"}
        started(folder, args, "imports", quick_start=True, env=env)
        figures["imports_s"] = imports((folder / "imports.log").read_text())
    return {"shape": args.shape, **figures}


def started(folder: Path, args: argparse.Namespace, name: str, **settings: Any) -> dict[str, Any]:
    """Start a server and kill it; return what its start took, on the clock and of the processors."""
    told, log, since = Told(), folder / f"{name}.log", time.monotonic()
    engine = start_engine(folder / "model", log, told=told, gpu=args.gpu, **settings)
    try:
        seconds = time.monotonic() - since
        event = told.last("engine_started")
        main = psutil.Process(event["server_pid"])
        times = [each.cpu_times() for each in (main, *main.children(recursive=True))]
        return {
            "seconds": round(seconds, 2),
            "cpu_s": round(sum(each.user + each.system for each in times), 2),
            "phases": event["phases"],
            "sglang": event["sglang"],
            "said": re.findall(r"quick start: (.*)", log.read_text()),
        }
    finally:
        engine.close()


def imports(log: str) -> dict[str, float]:
    """Return the seconds spent in modules of each package, of those where most are."""
    spent: Counter[str] = Counter()
    for own_us, module in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", log):
        spent[module.partition(".")[0]] += int(own_us)
    return {package: round(own_us / 1e6, 2) for package, own_us in spent.most_common(SLOWEST)}


if __name__ == "__main__":
    main()
