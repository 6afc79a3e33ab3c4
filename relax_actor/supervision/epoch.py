"""The run epoch: how many times a head has started with this run folder.

Whatever a head of an earlier epoch started is refused by everything of a later one.
"""

import fcntl
import os
from pathlib import Path


def next_epoch(run_dir: Path) -> int:
    """Count this start of a head; return its epoch, from 1.

    Two heads that start at the same moment get two epochs, and a crash leaves the old number or the new.
    """
    with (run_dir / "epoch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        epoch = current_epoch(run_dir) + 1
        part = run_dir / ".epoch.part"
        with part.open("w") as file:
            file.write(f"{epoch}\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(run_dir / "epoch")
    return epoch


def current_epoch(run_dir: Path) -> int:
    """Return the epoch of the newest head of this run folder, 0 before the first."""
    try:
        return int((run_dir / "epoch").read_text())
    except FileNotFoundError:
        return 0
