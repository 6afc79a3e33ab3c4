"""The main thread of an actor process: constructor, messages one at a time, `step` in between, end.

Calls are put into a bounded mailbox by whoever reads the sockets, which is this thread while it is idle (see
`watch`), and taken out in order. Asynchronous
endpoints run as tasks of this thread's event loop, so their awaits let other messages in; synchronous
endpoints and `step` have the thread to themselves.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from relax_actor import faults
from relax_actor.actor import failure
from relax_actor.actor.base import Actor, Context, EndpointOptions, options_of
from relax_actor.actor.convert import Signature, signature_of
from relax_actor.actor.courier import Callee, Courier
from relax_actor.actor.duty import Duty
from relax_actor.actor.gang import Gang
from relax_actor.actor.lines import HeadLine
from relax_actor.actor.mailbox import DeadReason, Incoming, Mailbox
from relax_actor.actor.page import PageState, PageWriter
from relax_actor.actor.ref import Ref
from relax_actor.actor.threads import stacks_of_all_threads
from relax_actor.actor.watch import RestingSelector
from relax_actor.actor.wire import (
    Failed,
    GangAbort,
    Hello,
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
from relax_actor.errors import GangAborted
from relax_actor.ids import Holder
from relax_actor.telemetry import EventLog
from transport import codec
from transport.address import Address
from transport.control import Frames
from transport.errors import CodecError
from transport.security import CurveKeys
from transport.shm import ShmSpace

LAST_WORDS_S = 0.05
"""How long a fatal error's own answer gets to leave the process before it ends."""

MESSAGES_BETWEEN_STEPS = 64
"""How many waiting messages are handled before `step` gets its turn."""

TICK_S = 0.25
"""How often the I/O thread says on the status page that it runs."""


def main(config: NodeConfig, spawn: Spawn, arguments: Frames) -> int:
    """Run one actor until it ends; return the process' exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to interpret
    faulthandler.enable()  # a SIGSEGV leaves its stacks in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faults.arm(spawn.name, spawn.incarnation)
    sys.path.extend(entry for entry in config.path if entry not in sys.path)
    try:
        return _Process(config, spawn).run(codec.unpack(arguments))
    except BaseException:  # noqa: BLE001 - whatever it is, it is why this process died
        with contextlib.suppress(OSError):  # the disk is full: the log may have room where a new file has not
            Path(spawn.crash).write_text(traceback.format_exc(), errors="backslashreplace")
        traceback.print_exc()
        return 1


def load_target(target: str) -> type[Actor]:
    """Find an actor class named `module:Class`, or `path.py:Class` for one of the user's script.

    Raises:
        TypeError: what was found is not an actor class.
    """
    where, _, name = target.rpartition(":")
    module: Any = _load_script(where) if where.endswith(".py") else importlib.import_module(where)
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise TypeError(f"{target} is not a subclass of relax_actor.Actor")
    return found


def _load_script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("__relax_main__", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__relax_main__"] = module
    spec.loader.exec_module(module)
    return module


class _Endpoint(msgspec.Struct, frozen=True):
    method: Callable[..., Any]
    options: EndpointOptions
    signature: Signature


class _ArgumentsError(Exception):
    """What came are not the method's arguments; the same error out of the method itself is its own."""


class _Process(Callee):
    """One actor, its mailbox and its courier."""

    def __init__(self, config: NodeConfig, spawn: Spawn) -> None:
        self._spawn = spawn
        self._holder = Holder(spawn.name, spawn.incarnation)
        self._gone: deque[PeerGone] = deque()
        self._tasks: dict[tuple[bytes, int], tuple[asyncio.Task[None], Incoming]] = {}
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._running: Incoming | None = None
        self._running_since = 0.0
        self._stop_reason = ""
        self._stopping = False
        self._selector = RestingSelector()
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]
        self._timer: asyncio.TimerHandle | None = None
        self._turn_is_due = self._reads_now = False
        self._actor: Actor
        self._promoted: asyncio.Future[Promote]
        self.gang = Gang()
        space = ShmSpace(config.run_id, config.shm_root)
        self._page = PageWriter(space, spawn.name, spawn.incarnation, ",".join(spawn.devices))
        self._courier = Courier(
            self._holder,
            config.run_mark,
            Address.parse(spawn.address),
            head=Address.parse(config.head),
            callee=self,
            on_record=self._record,
            space=space,
            remote=Address.tcp(config.listen) if config.listen and config.keys else None,
            keys=CurveKeys.from_bytes(config.keys) if config.keys else None,
            head_line=HeadLine(config.epoch, spawn.incarnation, config.lease.renew_s)
            if config.is_remote
            else None,
        )
        self._mailbox = Mailbox(self._courier.say)
        events = EventLog(Path(config.run_dir) / "events.jsonl", spawn.name, spawn.incarnation)
        self._duty = Duty(self._courier, self.gang, spawn.hang_after_s)
        self._context = Context(self._holder, config.run_id, Path(config.run_dir), events, self)

    def run(self, arguments: dict[str, Any]) -> int:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
            return runner.run(self._run(arguments))

    async def _run(self, arguments: dict[str, Any]) -> int:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._promoted = self._loop.create_future()
        self._loop.add_signal_handler(signal.SIGTERM, self._stop, "SIGTERM")
        self._courier.start()
        self._courier.tell_head(Hello(name=self._holder.name, incarnation=self._holder.incarnation))
        try:
            self._actor = self._construct(arguments)
            if self._spawn.is_spare:
                await self._await_promotion()
            self._duty.start(self._holder)
            self._read_while_idle()
            self._page.set_state(PageState.READY)
            self._courier.tell_head(self._ready())
            await self._serve()
            self._actor.on_stop(self._stop_reason)
        finally:
            self._selector.watch = None
            self._loop.remove_reader(self._courier.fileno())
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
        args, kwargs = signature_of(cls.__init__).bind([], arguments)
        actor.__init__(*args, **kwargs)  # type: ignore[misc]  # ctx had to be there first
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

    def _read_while_idle(self) -> None:
        self._loop.add_reader(self._courier.fileno(), self._read)
        self._selector.watch = self._courier.watch

    def _read(self) -> None:
        self._reads_now = True  # a turn that becomes due in here needs no wake-up
        try:
            self._courier.read()
        finally:
            self._reads_now = False
        if self._turn_is_due:
            self._turn()

    async def _serve(self) -> None:
        self._turn()
        await self._ended
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        """Handle what waits, let `step` work, and say when the next turn is."""
        self._turn_is_due = False  # before looking: what comes after this asks for another turn
        if self._stopping:
            return
        try:
            self._handle_waiting()
            delay_s = None if self._stopping else self._step()
        except BaseException as error:  # noqa: BLE001 - it ends the process; see `main`
            self._end(error)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (self._mailbox and self._may_work) or self._gone or delay_s == 0:
            self._next_turn()
        elif delay_s is not None:
            self._timer = self._loop.call_later(delay_s, self._turn)

    def _step(self) -> float | None:
        """Let the actor work; what it raises because its gang broke meanwhile is not its failure."""
        if not self._may_work:
            return None
        breaks = self.gang.breaks
        try:
            with self._duty.busy("step"):
                return self._actor.step()
        except Exception as error:
            if not self.gang.broke_since(breaks, error):
                raise
            self._context.events.emit("gang_left", epoch=self.gang.epoch, method="step")
            return None

    @property
    def _may_work(self) -> bool:
        return self.gang.is_whole or not self._spawn.is_rank

    def _next_turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _handle_waiting(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            self._mailbox.forget(f"{gone.name}#{gone.incarnation}".encode())
            self._actor.on_peer_gone(gone.name, gone.incarnation, gone.reason)
        for _ in range(MESSAGES_BETWEEN_STEPS):
            if not self._mailbox or self._stopping or not self._may_work:
                return
            incoming = self._mailbox.take()
            with self._duty.busy(incoming.call.method):
                self._handle(incoming)

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    # -- one call -------------------------------------------------------------------------------

    def _handle(self, incoming: Incoming) -> None:
        call = incoming.call
        endpoint = self._endpoints.get(call.method) or self._find_endpoint(call.method)
        if incoming.is_cancelled:
            self._dead_letter(incoming, DeadReason.CANCELLED, "before it was started")
        elif endpoint is None:
            detail = f"{type(self._actor).__name__} has no endpoint {call.method!r}"
            self._refuse(incoming, DeadReason.UNKNOWN, detail)
        elif time.monotonic() >= incoming.expires:
            self._refuse(incoming, DeadReason.EXPIRED, f"{call.method} waited longer than its caller does")
        else:
            self._running, self._running_since = incoming, time.monotonic()
            self._start(incoming, endpoint)
            self._running = None

    def _find_endpoint(self, name: str) -> _Endpoint | None:
        method = getattr(type(self._actor), name, None)
        options = options_of(method) if callable(method) else None
        if method is None or options is None:
            return None
        found = self._endpoints[name] = _Endpoint(method, options, signature_of(method))
        return found

    def _start(self, incoming: Incoming, endpoint: _Endpoint) -> None:
        try:
            result = self._call(incoming, endpoint)
        except _ArgumentsError as error:
            self._refuse(incoming, DeadReason.ARGUMENTS, f"{incoming.call.method}: {error}")
        except Exception as error:  # noqa: BLE001 - a failed method fails its call, never the actor
            self._over(incoming)
            self._fail(incoming, error)
        else:
            if isinstance(result, Awaitable):
                self._await(incoming, result, endpoint.options)
            else:
                self._over(incoming)
                self._answer(incoming, result)

    def _call(self, incoming: Incoming, endpoint: _Endpoint) -> Any:
        """Run the method; what it does not keep of its arguments is free when this returns."""
        try:
            arguments, keywords = codec.unpack(incoming.frames)
            args, kwargs = endpoint.signature.bind(arguments, keywords)
        except (CodecError, msgspec.ValidationError) as error:
            raise _ArgumentsError(str(error)) from error
        incoming.frames = ()
        del arguments, keywords
        call = incoming.call
        self._duty.begin(incoming, endpoint.options)
        self._page.begin(call.sender, call.sender_incarnation, call.id, call.method)
        return endpoint.method(self._actor, *args, **kwargs)

    def _await(self, incoming: Incoming, result: Awaitable[Any], options: EndpointOptions) -> None:
        key = incoming.peer, incoming.call.id
        task = asyncio.ensure_future(self._finish_later(incoming, result, options))
        self._tasks[key] = task, incoming
        task.add_done_callback(lambda _task: self._tasks.pop(key, None))

    async def _finish_later(
        self, incoming: Incoming, result: Awaitable[Any], options: EndpointOptions
    ) -> None:
        limit = self._limits.setdefault(incoming.call.method, asyncio.Semaphore(options.concurrency))
        try:
            async with limit:
                value = await result
                self._over(incoming)
                self._answer(incoming, value)
        except asyncio.CancelledError:
            self._over(incoming)
            self._duty.end(incoming)
            if incoming.is_cancelled:  # by its caller, and not because the process ends
                self._dead_letter(incoming, DeadReason.CANCELLED, "while it was awaited")
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._over(incoming)
            self._fail(incoming, error)
        finally:
            if inspect.iscoroutine(result):  # one that waited for its turn would be reported as never awaited
                result.close()

    def _over(self, incoming: Incoming) -> None:
        call = incoming.call
        self._page.end(call.sender, call.sender_incarnation, call.id)

    def _answer(self, incoming: Incoming, value: Any) -> None:
        if self._duty.end(incoming):
            self._send_failure(incoming, self.gang.aborted())
            return
        try:
            self._courier.respond(incoming, value)
        except CodecError as error:
            message = f"{incoming.call.method} returned what cannot be sent: {error}"
            failed = Failed(id=incoming.call.id, kind="unserializable", message=message)
            self._courier.refuse(incoming, failed)

    def _refuse(self, incoming: Incoming, reason: DeadReason, detail: str) -> None:
        self._duty.end(incoming)
        self._dead_letter(incoming, reason, detail)
        self._courier.refuse(incoming, Failed(id=incoming.call.id, kind="refused", message=detail))

    def _fail(self, incoming: Incoming, error: Exception) -> None:
        if self._duty.end(incoming, error) and not isinstance(error, GangAborted):
            aborted = self.gang.aborted()
            aborted.__cause__ = error  # a collective that broke raises what its library likes
            error = aborted
        self._send_failure(incoming, error)
        if isinstance(error, type(self._actor).fatal):
            self._stopping = True
            self._loop.call_later(LAST_WORDS_S, self._end, error)

    def _send_failure(self, incoming: Incoming, error: Exception) -> None:
        failed = failure.describe(incoming.call.id, error)
        if not incoming.call.wants_reply:
            self._dead_letter(incoming, DeadReason.RAISED, failed.traceback)
        self._courier.refuse(incoming, failed)

    def _dead_letter(self, incoming: Incoming, reason: DeadReason, detail: str) -> None:
        call = incoming.call
        self._courier.dead_letters.add(reason, call, detail)
        self._context.events.emit("dead_letter", method=call.method, sender=call.sender, reason=detail)

    # -- Callee: whoever reads the sockets ------------------------------------------------------

    def started(self) -> None:
        self._page.hold()
        self._tick()

    def _tick(self) -> None:
        self._page.tick(len(self._mailbox), len(self._tasks))
        self._courier.loop.call_later(TICK_S, self._tick)

    def take(self, incoming: Incoming) -> bool:
        taken = self._mailbox.put(incoming)
        self.wake()
        return taken

    def cancel(self, peer: bytes, call_id: int) -> None:
        found = self._mailbox.find(peer, call_id) or self._running_call(peer, call_id)
        if found is not None:
            found.is_cancelled = True
        elif (awaited := self._tasks.get((peer, call_id))) is not None:
            task, incoming = awaited
            incoming.is_cancelled = True
            self._loop.call_soon_threadsafe(task.cancel)

    def is_open(self, peer: bytes, call_id: int) -> bool:
        waits = self._mailbox.find(peer, call_id) or self._running_call(peer, call_id)
        return waits is not None or (peer, call_id) in self._tasks

    def answer(self, what: str) -> Any:
        answers: dict[str, Callable[[], Any]] = {
            "ping": os.getpid,
            "stack": stacks_of_all_threads,
            "status": self._status,
            "dead_letters": lambda: list(self._courier.dead_letters.last),
        }
        return answers[what]()

    def reply_ended(self) -> None:
        self.wake()

    def main_ident(self) -> int | None:
        return threading.main_thread().ident

    def _running_call(self, peer: bytes, call_id: int) -> Incoming | None:
        running = self._running
        same = running is not None and running.call.id == call_id and running.peer == peer
        return running if same else None

    def _status(self) -> dict[str, Any]:
        running = self._running
        return {
            "pid": os.getpid(),
            "method": running.call.method if running else "",
            "method_s": round(time.monotonic() - self._running_since, 3) if running else 0.0,
            "mailbox_messages": len(self._mailbox),
            "awaiting": len(self._tasks),
            **self._courier.status(),
        }

    def _record(self, _peer: bytes, record: Record, _frames: Frames) -> None:
        if isinstance(record, Stop):
            self._loop.call_soon_threadsafe(self._stop, record.reason)
        elif isinstance(record, PeerGone):
            self._gone.append(record)
            self.wake()
        elif isinstance(record, GangAbort):
            self._abort_gang(record)
        elif isinstance(record, Regroup):
            self._loop.call_soon_threadsafe(self._regroup, record)
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

    # -- a gang's group, in the main thread ------------------------------------------------------

    def _release(self, epoch: int) -> None:
        name, incarnation = self._holder.name, self._holder.incarnation
        self._courier.tell_head(Released(name=name, incarnation=incarnation, epoch=epoch))

    def _regroup(self, group: Regroup) -> None:
        breaks = self.gang.breaks
        self.gang.join(group)
        if not self.gang.is_whole:
            return  # broken before it was joined
        try:
            with self._duty.busy("on_regroup"):
                self._actor.on_regroup(group.epoch)
        except BaseException as error:  # noqa: BLE001 - it ends the process; see `main`
            if not self.gang.broke_since(breaks, error):
                self._end(error)
        self._next_turn()

    # -- Host -----------------------------------------------------------------------------------

    def wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            if not self._reads_now:
                with contextlib.suppress(RuntimeError):  # the loop is closed: there are no turns any more
                    self._loop.call_soon_threadsafe(self._turn)

    def finish(self) -> None:
        self._stop("finished")

    def progress(self, text: str) -> None:
        self._page.progress(text)
        self._duty.progress(text)

    def cancelled(self) -> bool:
        return self._running is not None and self._running.is_cancelled

    def ref(self, name: str, actor: type[Any]) -> Ref[Any]:
        del actor  # only tells the type checker whose endpoints these are
        return Ref(name, self._courier)

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._stopping = True
        self._page.set_state(PageState.STOPPING)
        self._end()
