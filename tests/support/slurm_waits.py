"""Waiting for what Slurm does in its own time."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object], what: str, timeout_s: float = 150.0) -> None:
    """Poll until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
