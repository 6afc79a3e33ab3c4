"""What the kernel allows a process, raised as far as the process itself may raise it."""

import resource
from contextlib import suppress

ENOUGH = 1 << 20
"""Open files of one process; programs that look at every number up to the limit are slow beyond."""


def raise_open_files() -> tuple[int, int]:
    """Let this process, and those it starts, open as many files as it may.

    Returns:
        The limit now, and the most that it can be; -1 is no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)
