"""How an actor ends when its node agent's lease is over and nobody has ended it: by itself, and told why.

It happens where agent and keeper are both stopped, which breaks no pipe and is no death that the kernel would
pass on. The I/O thread looks whenever it ticks anyway, so a fence that never acts costs one load of memory.
Whether it acts is decided by `node.lease.ActorFence`.
"""

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path

from relax_actor.actor.page import PageWriter
from relax_actor.actor.threads import stacks_of_all_threads
from relax_actor.node.fuse import Fuse
from relax_actor.node.lease import ActorFence, LeaseTerms
from relax_actor.node.names import EXIT_FENCED
from relax_actor.telemetry import EventLog
from transport.clock import BootClock

_LOG_FD = 2


class Fence:
    """Looks until when the actor may live.

    Args:
        terms: of the agent's lease.
        page: where the agent says until when it holds.
        crash: takes the reason and the stacks.
        events: takes the reason.
    """

    def __init__(self, terms: LeaseTerms, page: PageWriter, crash: Path, events: EventLog) -> None:
        self._terms, self._page, self._crash, self._events = terms, page, crash, events
        self._fence, self._clock = ActorFence(terms), BootClock()

    def look(self) -> float:
        """Return how soon to look again at the latest, in seconds; does not return once the lease is over."""
        now_s = self._clock.monotonic()
        until_s = self._page.held_until_s
        next_s = self._fence.look(now_s, until_s)
        if next_s is None:
            self._end(until_s, now_s - until_s)
        return next_s or 0.0

    def _end(self, until_s: float, late_s: float) -> None:
        """Say why, and end with all that this actor has started; a disk that hangs delays it for a moment."""
        with suppress(OSError):
            Fuse().light(until_s + self._terms.kernel_grace_s)
        why = (
            f"the lease of its node agent has been over for {late_s:.3f} s, and nobody has ended this actor: "
            "agent and keeper are stopped, or hang; by now it may be running elsewhere"
        )
        with suppress(Exception):
            faulthandler.dump_traceback(_LOG_FD, all_threads=True)
            self._crash.write_text(f"{why}\n\n{stacks_of_all_threads()}", errors="backslashreplace")
        self._events.emit("actor_fenced", reason=why, late_s=late_s)
        end_with_group(EXIT_FENCED)


def end_with_group(code: int) -> None:
    """End this process and the others of its group, which would go on without it."""
    group = os.getpgrp()
    with suppress(OSError):
        os.setpgid(0, os.getpgid(os.getppid()))  # out of it, so that its end has a code and not a signal
    with suppress(ProcessLookupError):  # there is nobody else
        os.killpg(group, signal.SIGKILL)
    os._exit(code)
