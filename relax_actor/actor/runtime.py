"""The process of one actor: constructor, turns of the main thread, end.

Calls are put into a bounded mailbox by whoever reads the sockets, which is this thread while it is idle (see
`watch`), and taken out in order (`turns`), and carried out (`execution`).
"""

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from relax_actor import faults
from relax_actor.actor.base import Actor, Context
from relax_actor.actor.callee import Callee
from relax_actor.actor.convert import signature_of
from relax_actor.actor.courier import Courier
from relax_actor.actor.duty import Duty
from relax_actor.actor.execution import Execution
from relax_actor.actor.fence import Fence
from relax_actor.actor.gang import Gang
from relax_actor.actor.lines import HeadLine
from relax_actor.actor.mailbox import Incoming, Mailbox
from relax_actor.actor.page import PageState, PageWriter
from relax_actor.actor.ref import Ref
from relax_actor.actor.target import load_target
from relax_actor.actor.threads import stacks_of_all_threads
from relax_actor.actor.turns import Turns
from relax_actor.actor.watch import RestingSelector
from relax_actor.actor.wire import (
    GangAbort,
    Hello,
    Meeting,
    NodeConfig,
    PeerGone,
    Promote,
    Ready,
    Record,
    Regroup,
    Released,
    SpareReady,
    Spawn,
    Stop,
)
from relax_actor.ids import Holder
from relax_actor.telemetry import EventLog
from transport import codec
from transport.address import Address
from transport.control import Frames
from transport.security import CurveKeys
from transport.shm import ShmSpace

LAST_WORDS_S = 0.05
"""How long a fatal error's own answer gets to leave the process before it ends."""

LOOPBACK = "127.0.0.1"
"""Where the ranks of a gang meet that has one host."""

TICK_S = 0.25
"""How often the I/O thread says on the status page that it runs, and looks until when it may."""


def main(config: NodeConfig, spawn: Spawn, arguments: Frames, settle: Callable[[], object]) -> int:
    """Run one actor until it ends; return the process' exit code.

    Args:
        config: what all processes of the run have in common.
        spawn: which actor.
        arguments: its packed arguments.
        settle: called before any code of the user runs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to interpret
    faulthandler.enable()  # a SIGSEGV leaves its stacks in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faults.arm(spawn.name, spawn.incarnation)
    sys.path.extend(entry for entry in config.path if entry not in sys.path)
    try:
        return _Process(config, spawn, settle).run(arguments)
    except BaseException:  # noqa: BLE001 - whatever it is, it is why this process died
        with suppress(OSError):  # the disk is full: the log may have room where a new file has not
            Path(spawn.crash).write_text(traceback.format_exc(), errors="backslashreplace")
        traceback.print_exc()
        return 1


class _Process(Callee):
    """One actor, its mailbox and its courier."""

    def __init__(self, config: NodeConfig, spawn: Spawn, settle: Callable[[], object]) -> None:
        self._spawn, self._settle = spawn, settle
        self.shm_root, self.listen, self.host = config.shm_root, config.listen, config.host
        self._holder = Holder(spawn.name, spawn.incarnation)
        self._stop_reason = ""
        self._on_term = _take_no_notice if config.term_is_for_head else self._stop
        self._selector = RestingSelector()
        self._loop: asyncio.AbstractEventLoop
        self._actor: Actor
        self._promoted: asyncio.Future[Promote]
        self.gang = Gang()
        space = ShmSpace(config.run_id, config.shm_root)
        self._page = PageWriter(space, spawn.name, spawn.incarnation, ",".join(spawn.devices))
        self._courier = self._make_courier(config, space)
        self._mailbox = Mailbox(self._courier.say)
        events = EventLog(Path(config.run_dir) / "events.jsonl", spawn.name, spawn.incarnation)
        self._fence = Fence(config.lease, self._page, Path(spawn.crash), events)
        self._duty = Duty(self._page.work, self.gang, spawn.hang_after_s)
        self._execution = Execution(
            self._courier.serving, self._page, self._duty, self.gang, events, on_fatal=self._fatal
        )
        self._turns = Turns(
            self._mailbox,
            self._execution,
            self._courier,
            duty=self._duty,
            gang=self.gang,
            events=events,
            is_rank=spawn.is_rank,
            open_meeting=self._open_meeting,
        )
        self._context = Context(self._holder, config.run_id, Path(config.run_dir), events, self)

    def run(self, arguments: Frames) -> int:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
            return runner.run(self._run(arguments))

    def _make_courier(self, config: NodeConfig, space: ShmSpace) -> Courier:
        line = HeadLine(config.epoch, self._spawn.incarnation, config.lease.renew_s)
        return Courier(
            self._holder,
            config.run_mark,
            Address.parse(self._spawn.address),
            head=Address.parse(config.head),
            callee=self,
            on_record=self._record,
            space=space,
            remote=Address.tcp(config.listen) if config.listen and config.keys else None,
            keys=CurveKeys.from_bytes(config.keys) if config.keys else None,
            head_line=line if config.is_remote else None,
        )

    async def _run(self, arguments: Frames) -> int:
        self._loop = asyncio.get_running_loop()
        self._turns.start(self._loop)
        self._promoted = self._loop.create_future()
        self._loop.add_signal_handler(signal.SIGTERM, self._on_term, "SIGTERM")
        self._courier.start()
        self._courier.tell_head(Hello(name=self._holder.name, incarnation=self._holder.incarnation))
        try:
            self._settle()
            self._actor = self._execution.actor = self._turns.actor = self._construct(codec.unpack(arguments))
            if self._spawn.is_spare:
                await self._await_promotion()
            self._selector.wait_for_messages(self._courier.watch, self._turns.read)
            self._page.set_state(PageState.READY)
            self._courier.tell_head(self._ready())
            await self._turns.serve()
            self._actor.on_stop(self._stop_reason)
        finally:
            self._selector.wait_for_no_messages()
            self._courier.stop()
            self._context.events.close()
        return 0

    def _ready(self) -> Ready:
        remote = self._courier.remote_address
        return Ready(
            name=self._holder.name,
            incarnation=self._holder.incarnation,
            address=str(remote) if remote else "",
        )

    def _construct(self, arguments: dict[str, Any]) -> Actor:
        cls = load_target(self._spawn.target)
        actor = cls.__new__(cls)
        actor.ctx = self._context
        if cls.__init__ is not object.__init__:  # whose signature `inspect` would parse for milliseconds
            args, kwargs = signature_of(cls.__init__).bind([], arguments)
            actor.__init__(*args, **kwargs)  # type: ignore[misc]  # ctx had to be there first
        elif arguments:
            raise TypeError(f"{cls.__qualname__} takes no arguments, not {', '.join(arguments)}")
        return actor

    async def _await_promotion(self) -> None:
        self._courier.tell_head(SpareReady(name=self._holder.name))
        promoted = await self._promoted
        self._holder = self._context.holder = Holder(promoted.name, promoted.incarnation)
        events = self._context.events
        events.actor, events.incarnation = promoted.name, promoted.incarnation
        faults.arm(promoted.name, promoted.incarnation)
        self._courier.rename(self._holder)
        self._courier.tell_head(Hello(name=promoted.name, incarnation=promoted.incarnation))
        self._actor.on_promoted()

    def _fatal(self, error: Exception) -> None:
        self._turns.stop()
        self._loop.call_later(LAST_WORDS_S, self._turns.end, error)

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._turns.stop()
        if self._page.is_ready:  # who never was must not look as if
            self._page.set_state(PageState.STOPPING)
        self._turns.end()

    # -- Callee: whoever reads the sockets ------------------------------------------------------

    def started(self) -> None:
        self._page.hold()
        self._tick()

    def _tick(self) -> None:
        self._page.tick(len(self._mailbox), self._execution.awaiting)
        self._courier.loop.call_later(min(TICK_S, self._fence.look()), self._tick)

    def take(self, incoming: Incoming) -> bool:
        taken = self._mailbox.put(incoming)
        self._turns.wake()
        return taken

    def cancel(self, peer: bytes, call_id: int) -> None:
        waiting = self._mailbox.find(peer, call_id)
        if waiting is not None:
            waiting.is_cancelled = True
        else:
            self._execution.cancel(peer, call_id)

    def is_open(self, peer: bytes, call_id: int) -> bool:
        return self._mailbox.find(peer, call_id) is not None or self._execution.is_open(peer, call_id)

    def answer(self, what: str) -> Any:
        answers: dict[str, Callable[[], Any]] = {
            "ping": os.getpid,
            "stack": stacks_of_all_threads,
            "status": self._status,
            "dead_letters": lambda: list(self._courier.serving.dead_letters.last),
        }
        return answers[what]()

    def reply_ended(self) -> None:
        self._turns.wake()

    def main_ident(self) -> int | None:
        return threading.main_thread().ident

    def _status(self) -> dict[str, Any]:
        running = self._execution.running
        return {
            "pid": os.getpid(),
            "method": running.call.method if running else "",
            "method_s": round(time.monotonic() - self._execution.running_since, 3) if running else 0.0,
            "mailbox_messages": len(self._mailbox),
            "awaiting": self._execution.awaiting,
            **self._courier.status(),
        }

    # -- other records; I/O thread ----------------------------------------------------------------

    def _record(self, _peer: bytes, record: Record, _frames: Frames) -> None:
        if isinstance(record, Stop) and record.drain_s > 0:
            self._loop.call_soon_threadsafe(self._turns.drain)
        elif isinstance(record, Stop):
            self._loop.call_soon_threadsafe(self._stop, record.reason)
        elif isinstance(record, PeerGone):
            self._turns.peer_gone(record)
        elif isinstance(record, GangAbort):
            self._abort_gang(record)
        elif isinstance(record, Regroup):
            self._loop.call_soon_threadsafe(self._turns.regroup, record)
        elif isinstance(record, Promote):
            self._loop.call_soon_threadsafe(self._promoted.set_result, record)

    def _abort_gang(self, abort: GangAbort) -> None:
        """Get the main thread out of its collectives, and say when it is."""
        self.gang.abort(abort.epoch, abort.reason)
        try:
            self._actor.on_gang_abort(abort.epoch)
        except Exception:  # noqa: BLE001 - a main thread that stays blocked is killed for it
            traceback.print_exc()
        self._loop.call_soon_threadsafe(self._release, abort.epoch)

    def _release(self, epoch: int) -> None:
        name, incarnation = self._holder.name, self._holder.incarnation
        self._courier.tell_head(Released(name=name, incarnation=incarnation, epoch=epoch))

    # -- a gang's group, in the main thread ------------------------------------------------------

    def _open_meeting(self, group: Regroup) -> None:
        """Have the others come, as rank 0: where they are to is bound first and told then."""
        rendezvous = self._actor.open_rendezvous(group.epoch, self.listen or LOOPBACK)
        self.gang.join(msgspec.structs.replace(group, rendezvous=rendezvous))
        name, incarnation = self._holder.name, self._holder.incarnation
        meeting = Meeting(name=name, incarnation=incarnation, epoch=group.epoch, rendezvous=rendezvous)
        self._courier.tell_head(meeting)

    # -- Host -----------------------------------------------------------------------------------

    def wake(self) -> None:
        self._turns.wake()

    def finish(self) -> None:
        self._stop("finished")

    def progress(self, text: str) -> None:
        self._page.progress(text)

    def cancelled(self) -> bool:
        return self._execution.running is not None and self._execution.running.is_cancelled

    def ref(self, name: str, actor: type[Any]) -> Ref[Any]:
        del actor  # only tells the type checker whose endpoints these are
        return Ref(name, self._courier.caller)


def _take_no_notice(reason: str) -> None:
    """Hear a signal that is for the head."""
