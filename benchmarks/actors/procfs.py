"""What /proc says of processes: who descends from whom, memory, CPU time, who bears a mark."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MIB = 1 << 20
MARK = "RELAX_BENCH_MARK"
"""Environment variable that names the unit a process was started for."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in {"Z", "X"}


def descendants(root: int = 0) -> list[int]:
    """Return the pids of all live descendants of `root`, by default of this process."""
    parents = {
        pid: int(fields[1]) for pid in pids() if (fields := _stat(pid)) and fields[0] not in {"Z", "X"}
    }
    found: list[int] = []
    todo = [root or os.getpid()]
    while todo:
        parent = todo.pop()
        children = [pid for pid, its in parents.items() if its == parent]
        found += children
        todo += children
    return found


def marked(mark: str) -> list[int]:
    """Return the pids of live processes whose environment bears this mark."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in pids() if wanted in _read(pid, "environ").split(b"\0") and alive(pid)]


def clear(mark: str) -> int:
    """Kill the processes that bear this mark; return how many those were."""
    left = marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def cpu_s(processes: Iterable[int]) -> float:
    """Return the CPU time these processes have used, user and system, in seconds; 10 ms a step."""
    fields = [stat for pid in processes if (stat := _stat(pid))]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS_PER_S


def tree_cpu_s() -> float:
    """Return the CPU time of this process and its live descendants, in seconds."""
    return cpu_s([os.getpid(), *descendants()])


def rss_pss_mib(pid: int) -> tuple[float, float]:
    """Return resident and proportional memory in MiB; the second divides shared pages among their users."""
    lines = _read(pid, "smaps_rollup").decode().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("Rss:", "Pss:"))}
    return sizes.get("Rss", 0) / 1024, sizes.get("Pss", 0) / 1024


def wait_gone(processes: Iterable[int], since: float, timeout_s: float) -> dict[int, float]:
    """Return for each process how many seconds after `since` (perf_counter) it had ended.

    A process that outlives `timeout_s` is missing. The end is heard by pidfd: exact, and no polling.
    """
    fds = {fd: pid for pid in processes if (fd := _pidfd(pid)) >= 0}
    gone = {pid: time.perf_counter() - since for pid in processes if pid not in fds.values()}
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    while fds and (left_s := since + timeout_s - time.perf_counter()) > 0:
        for fd, _ in poller.poll(left_s * 1e3):
            gone[fds.pop(fd)] = time.perf_counter() - since
            poller.unregister(fd)
            os.close(fd)
    for fd in fds:
        os.close(fd)
    return gone


def pids() -> list[int]:
    """Return the pids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - no Path objects


def busy_and_steal() -> tuple[int, int, int]:
    """Return the machine's total, idle and stolen CPU ticks since boot."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4], ticks[7]


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _stat(pid: int) -> list[str]:
    """Return the fields after the command's name, from the state on; empty where there is no process."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
