"""The last look at an actor that is about to be killed: the stacks of all its threads, into its own log."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from relax_actor.node.facts import Handling, look
from relax_actor.node.process import start_time

DUMPED_BY = signal.SIGUSR1

DUMP_DEADLINE_S = 5.0
"""How long a process that is not stopped may take: on a busy machine it has to wait for a processor."""

BEGIN_S = 0.2
"""After so long a process that has no signal to take any more, and has written nothing, writes elsewhere."""

_POLL_S = 0.01
_SIGN = b"Current thread "  # the one that took the signal


async def dump_stacks(pid: int, log: Path) -> None:
    """Have a live actor write its stacks (see `faulthandler`), also while C code holds the interpreter lock.

    Returns when the dump is whole, at once where the process is stopped or dead, since it writes nothing, or
    after `DUMP_DEADLINE_S`.
    """
    before, since_s = size_of(log), time.monotonic()
    started, handling = start_time(pid), Handling(pid, DUMPED_BY)
    with suppress(ProcessLookupError):
        os.kill(pid, DUMPED_BY)
    while (waited_s := time.monotonic() - since_s) < DUMP_DEADLINE_S:
        facts = look(pid, started)
        if facts is None or facts.is_stopped:
            return
        if handling.is_over and (waited_s >= BEGIN_S or _SIGN in read_from(log, before)):
            return
        await asyncio.sleep(_POLL_S)


def size_of(log: Path) -> int:
    """Return how long a log is by now, in bytes."""
    return log.stat().st_size if log.exists() else 0


def read_from(log: Path, offset: int) -> bytes:
    """Return what is in a log after so many bytes."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""
