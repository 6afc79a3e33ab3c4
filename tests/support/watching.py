"""What the tests of a real tree wait for and look at."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from relax_actor import Backoff, Supervisor
from relax_actor.telemetry import Event, read_events

QUICK = Backoff(base_s=0.01, cap_s=0.05)
"""Restarts that a test need not wait for."""


def eventually(condition: Callable[[], Any], timeout_s: float = 20.0, *, poll_s: float = 0.01) -> Any:
    """Return what a condition comes to, once it holds.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if found := condition():
            return found
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(poll_s)


@contextmanager
def ended_after(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill a process when the block is left, also by a failure, so that nobody waits for it."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def ended_at(*pids: int, timeout_s: float = 20.0) -> float:
    """Return when the last of these processes had ended, even if nobody reaps it: CLOCK_MONOTONIC seconds.

    Raises:
        AssertionError: one of them did not in time.
    """
    deadline, left = time.monotonic() + timeout_s, {os.pidfd_open(pid) for pid in pids}
    while left:
        ended = wait(left, max(0.0, deadline - time.monotonic()))
        assert ended, f"{len(left)} of {pids} did not end in time"
        for pidfd in map(int, ended):
            left.discard(pidfd)
            os.close(pidfd)
    return time.monotonic()


def descriptors_of(pid: int) -> dict[str, str]:
    """Return what each descriptor of a process leads to; it may close some meanwhile."""
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[descriptor.name] = str(descriptor.readlink())
    return found


def events_of(tree: Supervisor, kind: str) -> list[Event]:
    """Return the events of a kind so far, in their order."""
    return [event for event in read_events(tree.run_dir / "events.jsonl")[0] if event["kind"] == kind]


def is_dead(process: psutil.Process) -> bool:
    """Whether a process is gone, or waits to be reaped by a parent that may be stopped."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
