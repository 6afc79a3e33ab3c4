"""What an actor's main thread is at, told to the head's watchdog by the I/O thread.

A method with a `max_runtime_s` is announced before it begins and when it is over. With `hang_after_s` a
beat says, whenever that changed, whether the thread is busy and how much it has done. Both cost nothing
where neither is set.
"""

import threading

from relax_actor.actor.base import EndpointOptions
from relax_actor.actor.courier import Courier
from relax_actor.actor.gang import Gang
from relax_actor.actor.mailbox import Incoming
from relax_actor.actor.wire import Beat, Began, Ended
from relax_actor.ids import Holder

BEATS_PER_HANG = 4
ANNOUNCE_S = 1.0
"""How long a limited method waits to be announced; a broken I/O thread must not keep it for ever."""


class Duty:
    """The calls and steps under way. Written in the main thread, read in the I/O thread.

    Args:
        courier: tells the head.
        gang: whose breaks spoil the calls under way.
        hang_after_s: the child spec's; None: no beats.
    """

    def __init__(self, courier: Courier, gang: Gang, hang_after_s: float | None) -> None:
        self._courier, self._gang, self._hang_after_s = courier, gang, hang_after_s
        self._holder: Holder
        self._announced: set[int] = set()
        self._done = 0
        self._doing = ""
        self._text = ""
        self._last_beat: Beat | None = None

    def start(self, holder: Holder) -> None:
        """Begin to beat, under this name."""
        self._holder = holder
        if self._hang_after_s is not None:
            self._courier.run_soon(self._beat, min(1.0, self._hang_after_s / BEATS_PER_HANG))

    def begin(self, incoming: Incoming, options: EndpointOptions) -> None:
        """Note a call that is about to run; one with a limit is announced first."""
        incoming.gang_breaks = self._gang.breaks
        if options.max_runtime_s is not None:
            self._announce(id(incoming), incoming.call.method, options.max_runtime_s)

    def end(self, incoming: Incoming, error: Exception | None = None) -> bool:
        """Note that it is over, perhaps by an error; return whether its gang broke meanwhile."""
        self._done += 1
        if self._announced and id(incoming) in self._announced:
            self._announced.discard(id(incoming))
            name, incarnation = self._holder.name, self._holder.incarnation
            self._courier.tell_head(Ended(name=name, incarnation=incarnation, call=str(id(incoming))))
        breaks, incoming.gang_breaks = incoming.gang_breaks, None
        if error is None:
            return breaks not in (None, self._gang.breaks)
        return breaks is not None and self._gang.broke_since(breaks, error)

    def progress(self, text: str) -> None:
        """Note that the work goes on; any thread."""
        self._done += 1
        self._text = text

    def busy(self, doing: str) -> None:
        """Have the main thread busy with something until it is `idle`."""
        self._doing = doing

    def idle(self) -> None:
        """Note that what the main thread was busy with is over."""
        self._doing = ""
        self._done += 1

    def _announce(self, call: int, method: str, limit_s: float) -> None:
        """Wait until the I/O thread has sent it: the method may take the GIL and never give it back."""
        self._announced.add(call)
        record = Began(
            name=self._holder.name,
            incarnation=self._holder.incarnation,
            call=str(call),
            method=method,
            max_runtime_s=limit_s,
        )
        told = threading.Event()
        self._courier.tell_head(record)
        self._courier.run_soon(told.set)
        told.wait(ANNOUNCE_S)

    def _beat(self, every_s: float) -> None:
        doing = f"{self._doing} ({self._text})" if self._text else self._doing
        beat = Beat(
            name=self._holder.name,
            incarnation=self._holder.incarnation,
            is_busy=bool(self._doing),
            done=self._done,
            doing=doing,
        )
        if beat != self._last_beat:
            self._last_beat = beat
            self._courier.tell_head(beat)
        self._courier.loop.call_later(every_s, self._beat, every_s)
