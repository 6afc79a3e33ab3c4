"""Telling the owners of shared segments that nobody here looks at them any more (see `bulk`)."""

from collections import deque
from collections.abc import Callable

from relax_actor.actor.calls import Calls
from relax_actor.actor.outbox import Outbox
from relax_actor.actor.wire import Unmapped
from relax_actor.ids import Holder
from transport.shm import parse_name
from transport.zmq_hub import Hub


class Releases:
    """What was released and not yet told.

    Args:
        hub: whose lock is held to send.
        calls: knows who of the owners is called from here.
        outbox: reaches those who call this process.
        tell_soon: arranges that `tell` is called; takes no lock.
    """

    def __init__(
        self, hub: Hub, calls: Calls, outbox: Outbox, tell_soon: Callable[[Callable[[], None]], None]
    ) -> None:
        self._hub, self._calls, self._outbox, self._tell_soon = hub, calls, outbox, tell_soon
        self._released: deque[str] = deque()

    def add(self, segment: str) -> None:
        """Note that a view of another's segment is gone; runs inside of whatever drops it."""
        self._released.append(segment)
        self._tell_soon(self.tell)

    def tell(self) -> None:
        """Tell the owners now; any thread."""
        if not self._released:
            return
        by_owner: dict[Holder, list[str]] = {}
        with self._hub.lock:
            while self._released:
                segment = self._released.popleft()
                name = parse_name(segment)
                by_owner.setdefault(Holder(name.owner, name.incarnation), []).append(segment)
            for owner, segments in by_owner.items():
                self._tell_owner(owner, Unmapped(segments=tuple(segments)))

    def _tell_owner(self, owner: Holder, record: Unmapped) -> None:
        peer = self._calls.peer(owner.name)
        if peer.incarnation == owner.incarnation:
            self._calls.send_record(peer, record)
        else:
            self._outbox.say(str(owner).encode(), record)
