"""The last look at an actor that is about to be killed: the stacks of all its threads, into its own log."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from relax_actor.node import process

DUMPED_BY = signal.SIGUSR1

DUMP_DEADLINE_S = 5.0
"""How long a process that is not stopped may take: on a busy machine it has to wait for a processor."""

_POLL_S = 0.005
_QUIET_S = 0.02
_SIGN = b"Current thread "  # the one that took the signal, the main thread: it is dumped last


async def dump_stacks(pid: int, log: Path) -> None:
    """Have a live actor write its stacks (see `faulthandler`), also while C code holds the interpreter lock.

    Returns when the dump is there and nothing more is written, at once where the process is stopped or dead,
    since it writes nothing, or after `DUMP_DEADLINE_S`.
    """
    before, seen, since = size_of(log), size_of(log), time.monotonic()
    deadline = since + DUMP_DEADLINE_S
    with suppress(ProcessLookupError):
        os.kill(pid, DUMPED_BY)
    while (now := time.monotonic()) < deadline and process.is_running(pid):
        size = size_of(log)
        if size != seen:
            seen, since = size, now
        elif size > before and now - since >= _QUIET_S and _SIGN in read_from(log, before):
            return
        await asyncio.sleep(_POLL_S)


def size_of(log: Path) -> int:
    """Return how long a log is by now, in bytes."""
    return log.stat().st_size if log.exists() else 0


def read_from(log: Path, offset: int) -> bytes:
    """Return what is in a log after so many bytes."""
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()
