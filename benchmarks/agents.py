"""What do hosts cost at the start? An empty tree over 1, 4, 16 and 64 node agents.

    python benchmarks/agents.py [--rounds 5]

All hosts are this machine: what leads to each is `env` instead of ssh, so that what is measured is ours: a
porter, a keeper, an agent and its first zygote for each host, and the head's work for all of them. In a round
each size has its turn, after two yardsticks: an interpreter that does nothing, and one that imports what a
keeper imports. A cost for each host that grows with their number would show in the last column.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from common import spread, write

from relax_actor import Supervisor, SupervisorSpec
from relax_actor.node.lease import LeaseTerms
from relax_actor.supervision.hosts import Host, Session

SIZES = (1, 4, 16, 64)
ADDRESS = "127.0.0.1"
YARDSTICKS = {"interpreter": "pass", "keeper's imports": "import relax_actor.node.keeper"}
LEASE = LeaseTerms(ttl_s=60.0, renew_s=5.0)  # a crowd on few cores is slow, not dead
JOIN_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    args = parser.parse_args()
    yardsticks: dict[str, list[float]] = {name: [] for name in YARDSTICKS}
    found: dict[int, list[dict[str, float]]] = {size: [] for size in args.sizes}
    for _ in range(args.rounds):
        for name, code in YARDSTICKS.items():
            yardsticks[name].append(_cpu_ms_of(code))
        for size in args.sizes:
            found[size].append(start_of(size))
            print(size, found[size][-1], file=sys.stderr, flush=True)
    write("agents", figures(yardsticks, found))


def start_of(size: int) -> dict[str, float]:
    """Start an empty tree over so many hosts, and end it; return what that took."""
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as name:
        folder = Path(name)
        tree = Supervisor(
            SupervisorSpec(id="empty", children=()),
            run_dir=folder / "run",
            hosts=_hosts(size, folder),
            address=ADDRESS,
            lease=LEASE,
            join_timeout_s=JOIN_S,
        )
        head = psutil.Process()
        before_s, started = sum(head.cpu_times()[:2]), time.perf_counter()
        with tree:
            ready_s = time.perf_counter() - started
            head_s = sum(head.cpu_times()[:2]) - before_s
            below = list(_alive(head))
            below_s = sum(sum(each.cpu_times()[:4]) for each in below)
            pss_bytes = sum(_pss_bytes(each) for each in below)
            leaving = time.perf_counter()
        return {
            "ready_s": ready_s,
            "ended_s": time.perf_counter() - leaving,
            "head_cpu_ms_per_host": head_s * 1e3 / size,
            "cpu_ms_per_host": (head_s + below_s) * 1e3 / size,
            "pss_mib_per_host": pss_bytes / 2**20 / size,
            "processes_per_host": len(below) / size,
        }


def figures(yardsticks: dict[str, list[float]], found: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the result: spreads, and how much dearer a host of the largest tree is than of a smaller one."""
    sizes = {
        str(size): {name: spread([each[name] for each in rounds]) for name in rounds[0]}
        for size, rounds in found.items()
    }
    small, large = sizes[str(sorted(found)[len(found) // 2])], sizes[str(max(found))]
    return {
        "workload": "an empty tree; hosts are local processes behind `env`, each with a session",
        "yardstick_cpu_ms": {name: spread(values) for name, values in yardsticks.items()},
        "hosts": sizes,
        "cpu_per_host_largest_over_middle": round(
            large["cpu_ms_per_host"]["median"] / small["cpu_ms_per_host"]["median"], 3
        ),
    }


def _hosts(size: int, folder: Path) -> list[Host]:
    return [
        Host(
            name=f"host{index}",
            prefix=("env",),
            address=ADDRESS,
            run_dir=str(folder / "hosts" / str(index)),
            session=Session(),
        )
        for index in range(size)
    ]


def _alive(head: psutil.Process) -> Iterator[psutil.Process]:
    for each in head.children(recursive=True):
        if each.status() != psutil.STATUS_ZOMBIE:
            yield each


def _pss_bytes(process: psutil.Process) -> int:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


def _cpu_ms_of(code: str) -> float:
    """Return the processor time of an interpreter that runs some code."""
    before = psutil.Process().cpu_times()
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    after = psutil.Process().cpu_times()
    return 1e3 * (after.children_user + after.children_system - before.children_user - before.children_system)


if __name__ == "__main__":
    main()
