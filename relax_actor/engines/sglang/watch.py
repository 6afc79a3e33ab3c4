"""Learns at once when one of several processes ends, be they children or not: a thread over pidfds."""

import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

FAMILY_S = 0.1
"""How long it may take until it shows that a process ends, after those of its children whom the kernel kills
with it. Then each of its threads has to run once more, which takes as long as others have the cores."""

_EXITING = 0x4
"""PF_EXITING of the flags in /proc/PID/stat."""

_STATE, _FLAGS = 0, 6
"""Fields of /proc/PID/stat, counted behind the command."""

_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)


class Watch:
    """Calls back once, at the first end.

    Args:
        processes: what to call each pid; the first, parent of the others, is named if it ends with them.
        on_end: called in the watching thread, in words; not after `close` has returned.
    """

    def __init__(self, processes: Mapping[int, str], on_end: Callable[[str], None]) -> None:
        self._names: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._on_end = on_end
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._stop, select.POLLIN)
        gone = self._open(processes)
        self._thread = threading.Thread(target=self._run, args=(gone,), name="sglang-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for pidfd in self._names:
            os.close(pidfd)
        os.close(self._stop)
        self._stop = -1

    def _open(self, processes: Mapping[int, str]) -> str:
        """Open what is there; return one that is not."""
        gone = ""
        for pid, name in processes.items():
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                gone = gone or f"{name} (pid {pid}) has ended"
                continue
            self._names[pidfd], self._pids[pidfd] = f"{name} (pid {pid}) has ended", pid
            self._poll.register(pidfd, select.POLLIN)
        return gone

    def _run(self, gone: str) -> None:
        while not gone:
            ended = [fd for fd, _ in self._poll.poll()]
            if self._stop in ended:
                return
            parent, pid = next(iter(self._pids.items()))
            gone = self._names[parent if parent in ended or _ends_too(parent, pid) else ended[0]]
        self._on_end(gone)


def _ends_too(pidfd: int, pid: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return is_ending(pid) or bool(poll.poll(FAMILY_S * 1000)) or is_ending(pid)


def is_ending(pid: int) -> bool:
    """Whether a process is gone, or its first thread has ended or is to."""
    try:  # in this order: what waits for it in the first shows in the second later
        status = Path(f"/proc/{pid}/status").read_text()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    waiting = int(status.partition("SigPnd:")[2].split()[0], 16)
    return bool(waiting & _SIGKILL_BIT or int(fields[_FLAGS]) & _EXITING or fields[_STATE] in "ZX")
