"""Learns at once when one of several processes ends, be they children or not: a thread over pidfds."""

import os
import select
import threading
from collections.abc import Callable, Mapping

FAMILY_S = 0.1
"""How long a process' own end may take after those of its children, whom the kernel kills with it."""


class Watch:
    """Calls back once, at the first end.

    Args:
        processes: what to call each pid; the first, parent of the others, is named if it ends with them.
        on_end: called in the watching thread, in words; not after `close` has returned.
    """

    def __init__(self, processes: Mapping[int, str], on_end: Callable[[str], None]) -> None:
        self._names: dict[int, str] = {}
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
                gone = f"{name} (pid {pid}) has ended"
                continue
            self._names[pidfd] = f"{name} (pid {pid}) has ended"
            self._poll.register(pidfd, select.POLLIN)
        return gone

    def _run(self, gone: str) -> None:
        while not gone:
            ended = [fd for fd, _ in self._poll.poll()]
            if self._stop in ended:
                return
            parent = next(iter(self._names))
            gone = self._names[parent if parent in ended or _ends_too(parent) else ended[0]]
        self._on_end(gone)


def _ends_too(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(FAMILY_S * 1000))
