"""Carrying out calls: arguments bound, the endpoint run in the main thread, the answer given.

Asynchronous endpoints run as tasks of the main thread's event loop, so their awaits let other messages in;
synchronous endpoints have the thread to themselves. A failed method fails its call, never the actor, unless
the actor's class says that the error is fatal.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from relax_actor.actor import failure
from relax_actor.actor.base import Actor, EndpointOptions, options_of
from relax_actor.actor.convert import Signature, signature_of
from relax_actor.actor.duty import Duty
from relax_actor.actor.gang import Gang
from relax_actor.actor.mailbox import DeadReason, Incoming
from relax_actor.actor.page import PageWriter
from relax_actor.actor.serving import Serving
from relax_actor.actor.wire import Failed
from relax_actor.errors import GangAborted
from relax_actor.telemetry import EventLog
from transport import codec
from transport.errors import CodecError


class _Endpoint(msgspec.Struct, frozen=True):
    method: Callable[..., Any]
    options: EndpointOptions
    signature: Signature


class _ArgumentsError(Exception):
    """What came are not the method's arguments; the same error out of the method itself is its own."""


class Execution:
    """The calls under way. Main thread, but for `cancel`, `is_open` and the attributes.

    Args:
        serving: what answers leave by.
        page: says which calls have begun and which are over.
        duty: writes down what the main thread is at.
        gang: whose breaks spoil the calls under way.
        events: where dead letters are logged.
        on_fatal: told of an error after which the actor cannot go on, once its call is answered.

    Attributes:
        actor: whose methods are called, once it is constructed.
        running: the synchronous call under way.
        running_since: when it began, in monotonic seconds.
    """

    def __init__(
        self,
        serving: Serving,
        page: PageWriter,
        duty: Duty,
        gang: Gang,
        events: EventLog,
        *,
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self._serving, self._page, self._duty, self._gang = serving, page, duty, gang
        self._events, self._on_fatal = events, on_fatal
        self._tasks: dict[tuple[bytes, int], tuple[asyncio.Task[None], Incoming]] = {}
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self.actor: Actor
        self.running: Incoming | None = None
        self.running_since = 0.0

    def handle(self, incoming: Incoming) -> None:
        """Carry out a call, or say why not."""
        call = incoming.call
        endpoint = self._endpoints.get(call.method) or self._find_endpoint(call.method)
        if incoming.is_cancelled:
            self._dead_letter(incoming, DeadReason.CANCELLED, "before it was started")
        elif endpoint is None:
            detail = f"{type(self.actor).__name__} has no endpoint {call.method!r}"
            self._refuse(incoming, DeadReason.UNKNOWN, detail)
        elif (now := time.monotonic()) >= incoming.expires:
            self._refuse(incoming, DeadReason.EXPIRED, f"{call.method} waited longer than its caller does")
        else:
            self.running, self.running_since = incoming, now
            self._start(incoming, endpoint)
            self.running = None

    @property
    def awaiting(self) -> int:
        """How many asynchronous calls are under way."""
        return len(self._tasks)

    def is_open(self, peer: bytes, call_id: int) -> bool:
        """Whether a call has begun and is not over; any thread."""
        return self._running_call(peer, call_id) is not None or (peer, call_id) in self._tasks

    def cancel(self, peer: bytes, call_id: int) -> None:
        """Stop a call that has begun: its task ends, or the method may ask; any thread."""
        if (running := self._running_call(peer, call_id)) is not None:
            running.is_cancelled = True
        elif (awaited := self._tasks.get((peer, call_id))) is not None:
            task, incoming = awaited
            incoming.is_cancelled = True
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _running_call(self, peer: bytes, call_id: int) -> Incoming | None:
        running = self.running
        same = running is not None and running.call.id == call_id and running.peer == peer
        return running if same else None

    def _find_endpoint(self, name: str) -> _Endpoint | None:
        method = getattr(type(self.actor), name, None)
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
            if hasattr(result, "__await__"):  # as `Awaitable` asks, at a tenth of the time
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
        return endpoint.method(self.actor, *args, **kwargs)

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

    # -- the end of a call ------------------------------------------------------------------------

    def _over(self, incoming: Incoming) -> None:
        call = incoming.call
        self._page.end(call.sender, call.sender_incarnation, call.id)

    def _answer(self, incoming: Incoming, value: Any) -> None:
        if self._duty.end(incoming):
            self._send_failure(incoming, self._gang.aborted())
            return
        try:
            self._serving.respond(incoming, value)
        except CodecError as error:
            message = f"{incoming.call.method} returned what cannot be sent: {error}"
            failed = Failed(id=incoming.call.id, kind="unserializable", message=message)
            self._serving.refuse(incoming, failed)

    def _refuse(self, incoming: Incoming, reason: DeadReason, detail: str) -> None:
        self._duty.end(incoming)
        self._dead_letter(incoming, reason, detail)
        self._serving.refuse(incoming, Failed(id=incoming.call.id, kind="refused", message=detail))

    def _fail(self, incoming: Incoming, error: Exception) -> None:
        if self._duty.end(incoming, error) and not isinstance(error, GangAborted):
            aborted = self._gang.aborted()
            aborted.__cause__ = error  # a collective that broke raises what its library likes
            error = aborted
        self._send_failure(incoming, error)
        if isinstance(error, type(self.actor).fatal):
            self._on_fatal(error)

    def _send_failure(self, incoming: Incoming, error: Exception) -> None:
        failed = failure.describe(incoming.call.id, error)
        if not incoming.call.wants_reply:
            self._dead_letter(incoming, DeadReason.RAISED, failed.traceback)
        self._serving.refuse(incoming, failed)

    def _dead_letter(self, incoming: Incoming, reason: DeadReason, detail: str) -> None:
        call = incoming.call
        self._serving.dead_letters.add(reason, call, detail)
        self._events.emit("dead_letter", method=call.method, sender=call.sender, reason=detail)
