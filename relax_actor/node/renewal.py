"""How a node agent keeps its lease, and where its keeper reads until when it holds.

Times are CLOCK_BOOTTIME of this host, so that a machine that was suspended finds its lease over.
"""

import asyncio
import mmap
import struct
from collections.abc import Callable

from relax_actor.actor.wire import NodeConfig, Renew
from relax_actor.node.lease import HeldLease
from relax_actor.node.line import Line
from transport.clock import BootClock, Clock

BOOT_CLOCK = BootClock()
_SECONDS = struct.Struct("d")


class LeaseEnd:
    """The end of the lease in memory that agent and keeper share; made before the fork between them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SECONDS.size)

    @property
    def at_s(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""
        at_s: float = _SECONDS.unpack_from(self._memory)[0]
        return at_s

    @at_s.setter
    def at_s(self, at_s: float) -> None:
        _SECONDS.pack_into(self._memory, 0, at_s)


class Renewal:
    """Asks the head for the lease again and again, and ends the agent when it is over.

    On the head's own host the kernel tells of the head's death. There the agent grants the lease itself: what
    it shows the keeper is that the agent runs.

    Args:
        config: names the terms.
        until: where the keeper looks.
        line: to the head.
        end: called when the lease is over.
        held: called with the new end of the lease whenever that has changed; seconds of the clock.
        clock: of this host.
    """

    def __init__(
        self,
        config: NodeConfig,
        until: LeaseEnd,
        line: Line,
        end: Callable[[str], None],
        held: Callable[[float], None],
        *,
        clock: Clock = BOOT_CLOCK,
    ) -> None:
        self._config, self._until, self._line, self._end = config, until, line, end
        self._held, self._clock = held, clock
        self._lease = HeldLease(config.lease, until.at_s)
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask now, and every `renew_s`."""
        self._loop = loop
        self._ask()

    def granted(self, number: int) -> None:
        """Take the head's answer."""
        self._line.recover()
        if self._config.is_remote:
            self._prolong(number)

    def _ask(self) -> None:
        now_s = self._clock.monotonic()
        if self._lease.is_over(now_s):
            self._end(f"its head granted no lease for {self._config.lease.ttl_s:g} s")
            return
        number = self._lease.ask(now_s)
        self._line.beat(Renew(number=number))
        if not self._config.is_remote:
            self._prolong(number)
        left_s = self._lease.until_s - now_s
        self._loop.call_later(min(self._config.lease.renew_s, left_s), self._ask)

    def _prolong(self, number: int) -> None:
        if self._lease.granted(number, self._clock.monotonic()):
            self._until.at_s = self._lease.until_s
            self._held(self._lease.until_s)
