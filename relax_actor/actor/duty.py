"""What an actor's main thread is at, written on the status page before it begins; see `work`.

A method with a `max_runtime_s` is written down while it is under way; with `hang_after_s`, whatever the
thread does is. Both cost nothing where neither is set, and stores into shared memory where one is.
"""

import time

from relax_actor.actor.base import EndpointOptions
from relax_actor.actor.gang import Gang
from relax_actor.actor.mailbox import Incoming
from relax_actor.actor.work import Limit, WorkWriter


class Duty:
    """The calls and steps under way. Main thread.

    Args:
        work: what the node agent looks at.
        gang: whose breaks spoil the calls under way.
        hang_after_s: the child spec's; None: nobody asks whether the thread is busy.
    """

    def __init__(self, work: WorkWriter, gang: Gang, hang_after_s: float | None) -> None:
        self._work, self._gang = work, gang
        self._tells_all = hang_after_s is not None
        self._limits: dict[int, Limit] = {}

    def begin(self, incoming: Incoming, options: EndpointOptions) -> None:
        """Note a call that is about to run; one with a limit is written down first."""
        incoming.gang_breaks = self._gang.breaks
        if (limit_s := options.max_runtime_s) is not None:
            self._limits[id(incoming)] = Limit(time.monotonic() + limit_s, limit_s, incoming.call.method)
            self._work.limit(self._limits)

    def end(self, incoming: Incoming, error: Exception | None = None) -> bool:
        """Note that it is over, perhaps by an error; return whether its gang broke meanwhile."""
        if self._limits and self._limits.pop(id(incoming), None) is not None:
            self._work.limit(self._limits)
        breaks, incoming.gang_breaks = incoming.gang_breaks, None
        if error is None:
            return breaks not in (None, self._gang.breaks)
        return breaks is not None and self._gang.broke_since(breaks, error)

    def busy(self, doing: str) -> None:
        """Have the main thread busy with something until it is `idle`."""
        if self._tells_all:
            self._work.busy(doing, time.monotonic())

    def idle(self) -> None:
        """Note that what the main thread was busy with is over."""
        if self._tells_all:
            self._work.idle()
