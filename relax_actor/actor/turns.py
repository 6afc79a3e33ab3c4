"""The main thread's turns: news of peers, messages one at a time, `step`; and when the next one is due."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from relax_actor.actor.base import Actor
from relax_actor.actor.courier import Courier
from relax_actor.actor.duty import Duty
from relax_actor.actor.execution import Execution
from relax_actor.actor.gang import Gang
from relax_actor.actor.mailbox import Mailbox
from relax_actor.actor.wire import PeerGone, Regroup
from relax_actor.telemetry import EventLog
from transport.zmq_hub import Ready

MESSAGES_BETWEEN_STEPS = 64
"""How many waiting messages are handled before `step` gets its turn."""


class Turns:
    """One actor's main thread, from its first message to its end; any thread may use `peer_gone` and `wake`.

    Args:
        mailbox: what waits.
        execution: carries out calls.
        courier: is read while there is nothing to do.
        duty: writes down what the thread is at.
        gang: without which a rank does nothing.
        events: where a spoiled step is logged.
        is_rank: whether this actor is a rank of a gang.
        open_meeting: opens, as rank 0, where the ranks of a group meet, and has the others come.

    Attributes:
        actor: who works, once it is constructed.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        execution: Execution,
        courier: Courier,
        *,
        duty: Duty,
        gang: Gang,
        events: EventLog,
        is_rank: bool,
        open_meeting: Callable[[Regroup], None],
    ) -> None:
        self._mailbox, self._execution, self._courier, self._duty = mailbox, execution, courier, duty
        self._gang, self._events, self._is_rank = gang, events, is_rank
        self._open_meeting = open_meeting
        self._gone: deque[PeerGone] = deque()
        self._is_stopping = False
        self._is_due = self._reads_now = False
        self._timer: asyncio.TimerHandle | None = None
        self.actor: Actor
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to take wake-ups, before there is an actor."""
        self._loop, self._ended = loop, loop.create_future()

    async def serve(self) -> None:
        """Take turns until the actor ends; raises what ended it."""
        self._turn()
        await self._ended
        if self._timer is not None:
            self._timer.cancel()

    def read(self, ready: Ready) -> None:
        """Read the sockets that were found ready, and take a turn if there is something to do.

        Args:
            ready: see `Hub.read`.
        """
        self._reads_now = True  # a turn that becomes due in here needs no wake-up
        try:
            self._courier.read(ready)
        finally:
            self._reads_now = False
        if self._is_due:
            self._turn()

    def wake(self) -> None:
        """Have a turn taken soon; any thread."""
        if not self._is_due:
            self._is_due = True
            if not self._reads_now:
                with contextlib.suppress(RuntimeError):  # the loop is closed: there are no turns any more
                    self._loop.call_soon_threadsafe(self._turn)

    def peer_gone(self, gone: PeerGone) -> None:
        """Have the actor told of a peer's end; any thread."""
        self._gone.append(gone)
        self.wake()

    def stop(self) -> None:
        """Handle nothing more."""
        self._is_stopping = True

    def drain(self) -> None:
        """Have the actor finish what it has."""
        if self._is_stopping:
            return
        try:
            self._duty.busy("on_drain")
            self.actor.on_drain()
        except BaseException as error:  # noqa: BLE001 - it ends the process; see `runtime.main`
            self.end(error)
        self._duty.idle()
        self._next()

    def end(self, error: BaseException | None = None) -> None:
        """Let `serve` return, or raise."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def regroup(self, group: Regroup) -> None:
        """Join a gang's next group."""
        breaks = self._gang.breaks
        self._gang.join(group)
        if not self._gang.is_whole:
            return  # broken before it was joined
        try:
            self._duty.busy("on_regroup")
            if group.rank == 0:
                self._open_meeting(group)
            self.actor.on_regroup(group.epoch)
        except BaseException as error:  # noqa: BLE001 - it ends the process; see `runtime.main`
            if not self._gang.broke_since(breaks, error):
                self.end(error)
        self._duty.idle()
        self._next()

    def _turn(self) -> None:
        """Handle what waits, let `step` work, and say when the next turn is."""
        self._is_due = False  # before looking: what comes after this asks for another turn
        if self._is_stopping:
            return
        try:
            self._handle_waiting()
            delay_s = None if self._is_stopping else self._step()
        except BaseException as error:  # noqa: BLE001 - it ends the process; see `runtime.main`
            self._duty.idle()
            self.end(error)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (self._mailbox and self._may_work) or self._gone or delay_s == 0:
            self._next()
        elif delay_s is not None:
            self._timer = self._loop.call_later(delay_s, self._turn)

    def _next(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def _handle_waiting(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            self._mailbox.forget(f"{gone.name}#{gone.incarnation}".encode())
            self.actor.on_peer_gone(gone.name, gone.incarnation, gone.reason)
        for _ in range(MESSAGES_BETWEEN_STEPS):
            if not self._mailbox or self._is_stopping or not self._may_work:
                return
            incoming = self._mailbox.take()
            self._duty.busy(incoming.call.method)
            self._execution.handle(incoming)
            self._duty.idle()

    def _step(self) -> float | None:
        """Let the actor work; what it raises because its gang broke meanwhile is not its failure."""
        if type(self.actor).step is Actor.step or not self._may_work:
            return None
        breaks = self._gang.breaks
        try:
            self._duty.busy("step")
            delay_s = self.actor.step()
        except Exception as error:
            if not self._gang.broke_since(breaks, error):
                raise
            self._events.emit("gang_left", epoch=self._gang.epoch, method="step")
            delay_s = None
        self._duty.idle()
        return delay_s

    @property
    def _may_work(self) -> bool:
        return not self._is_rank or self._gang.is_whole
