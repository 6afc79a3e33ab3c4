"""Threads that wait for a reply: meanwhile they read the sockets, and look for circles of waits."""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from relax_actor.actor import cycles
from relax_actor.actor.callee import Callee
from relax_actor.actor.calls import Calls
from relax_actor.actor.cycles import PROBE_AFTER_S, PROBE_AGAIN_S, Wait
from relax_actor.actor.ref import Reply
from relax_actor.actor.watch import Watch
from relax_actor.actor.wire import Probe
from relax_actor.errors import DeadlockError
from relax_actor.ids import Holder
from transport.zmq_hub import Hub


class Waits:
    """The `Waiter` of every reply of this process.

    Args:
        holder: this process.
        hub: whose lock is held to send.
        callee: who handles messages here, but not while its main thread waits.
        calls: what is waited for.
        settle: tells callers that their calls ended.
    """

    def __init__(
        self, holder: Holder, hub: Hub, callee: Callee, calls: Calls, settle: Callable[[], None]
    ) -> None:
        self.holder, self._hub, self._callee, self._calls, self._settle = holder, hub, callee, calls, settle
        self.watch: Watch
        self._wait: Wait | None = None

    def wait_for(self, reply: Reply[Any], timeout_s: float | None) -> None:
        """Return when a reply has ended, or after `timeout_s`; reads the sockets meanwhile if nobody does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        blocks = threading.get_ident() == self._callee.main_ident()
        if blocks:
            self._wait = Wait(callee=reply.call[0], call_id=reply.call[1])
        is_reader = self.watch.enter()
        try:
            self._wait_until(reply, deadline, blocks=blocks, is_reader=is_reader)
        finally:
            self.watch.leave(was_reader=is_reader)
            if blocks:
                self._wait = None

    def cancelled(self, reply: Reply[Any]) -> None:
        """Tell the callee that nobody waits any more; any thread."""
        with self._hub.lock:
            self._calls.cancel(*reply.call)
        self._settle()
        self.watch.wake_reader()

    def probed(self, peer: bytes, probe: Probe) -> None:
        """Break a circle of waits that closes here, or send the probe on; with the lock held."""
        wait = self._wait
        is_open = self._callee.is_open(peer, probe.call_id)
        match cycles.follow(probe, self.holder, wait, is_open=is_open), wait:
            case cycles.Circle(chain), Wait():
                self._calls.fail(wait.callee, wait.call_id, DeadlockError(chain))
            case Probe() as onward, Wait():
                self._calls.send_record(self._calls.peer(wait.callee), onward)

    def _wait_until(
        self, reply: Reply[Any], deadline: float | None, *, blocks: bool, is_reader: bool
    ) -> None:
        probe_at = time.monotonic() + PROBE_AFTER_S if blocks else None
        while not reply.done():
            if probe_at is None and deadline is None:
                self._rest(reply, None, is_reader=is_reader)
                continue
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            if probe_at is not None and now >= probe_at:
                self._probe()
                probe_at = now + PROBE_AGAIN_S
            until = min(each for each in (probe_at, deadline) if each is not None)
            self._rest(reply, until - now, is_reader=is_reader)

    def _rest(self, reply: Reply[Any], timeout_s: float | None, *, is_reader: bool) -> None:
        if is_reader:
            self.watch.rest(timeout_s)
        else:
            futures.wait((reply,), timeout_s)

    def _probe(self) -> None:
        if (wait := self._wait) is not None:
            with self._hub.lock:
                self._calls.send_record(self._calls.peer(wait.callee), cycles.begin(self.holder, wait))
