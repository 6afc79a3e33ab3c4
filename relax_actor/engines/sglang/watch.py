"""Learns at once when one of several processes ends, be they children or not: a thread over pidfds."""

import os
import select
import threading
from collections.abc import Callable, Mapping


class Watch:
    """Calls back once, at the first end.

    Args:
        processes: what to call each pid.
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
            for fd, _ in self._poll.poll():
                if fd == self._stop:
                    return
                gone = gone or self._names[fd]
        self._on_end(gone)
