"""How actors are called: `ref.ask(Counter.add, 4).result()`, `await ref.ask(...)`, `ref.tell(...)`."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from relax_actor.actor.base import Actor, EndpointOptions, options_of

A = TypeVar("A", bound=Actor)
R = TypeVar("R")
P = ParamSpec("P")

QUERY_TIMEOUT_S = 5.0

_conditions = threading.Lock()  # held while a reply's condition is made

# The states of `concurrent.futures.Future`.
_PENDING, _FINISHED = "PENDING", "FINISHED"
_ENDED = frozenset({_FINISHED, "CANCELLED", "CANCELLED_AND_NOTIFIED"})


class Waiter(Protocol):
    """Who carries a reply; see `waits.Waits`."""

    def wait_for(self, reply: "Reply[Any]", timeout_s: float | None) -> None:
        """Return when the reply has ended, or after `timeout_s`."""
        ...

    def cancelled(self, reply: "Reply[Any]") -> None:
        """Tell the callee that nobody waits any more."""
        ...


class Reply(Future[R], Generic[R]):
    """A call's answer to come: `.result()` in synchronous code, `await` in asynchronous code.

    It always ends: by the result, an `ActorError`, or the caller's deadline. Cancelling it ends it at once;
    the callee is told, and does not start the call, cancels its task, or goes on with `ctx.cancelled()` true.

    Attributes:
        call: the callee's name and the call's number, once it was sent.
    """

    call: tuple[str, int] = ("", 0)
    waiter: Waiter | None = None

    def __init__(self) -> None:
        # As `Future.__init__`, without the condition: nearly every reply ends before anybody needs it.
        self._state = _PENDING
        self._result: R | None = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Make the condition for whoever is the first to need it."""
        if name != "_condition":
            raise AttributeError(name)
        with _conditions:
            return self.__dict__.setdefault(name, threading.Condition())

    def result(self, timeout: float | None = None) -> R:
        """Wait for the answer and return it.

        Args:
            timeout: in seconds, beside the call's own deadline.

        Raises:
            TimeoutError: `timeout` passed; the call goes on.
            DeadlockError: the callee waits, itself or through others, for this actor.
        """
        if not self.done():
            timeout = self._wait(timeout)
        if self._state == _FINISHED and self._exception is None:  # nearly always, and then no lock is needed
            return cast(R, self._result)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the error, if there was one; see `result`."""
        return super().exception(self._wait(timeout))

    def done(self) -> bool:
        """Whether it has ended."""
        return self._state in _ENDED  # one read: no lock is needed for it

    def end(self, value: Any, error: BaseException | None) -> None:
        """End the reply; one that was cancelled stays so. For its courier only."""
        with _conditions:  # whoever asks for the condition after this sees the new state
            is_looked_at = "_condition" in self.__dict__
            if not is_looked_at:
                self._result, self._exception, self._state = value, error, _FINISHED
        if is_looked_at and self.set_running_or_notify_cancel():
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def cancel(self) -> bool:
        """End the reply now, if it has not ended, and tell the callee."""
        if self.done() or not super().cancel():
            return self.cancelled()
        if self.waiter is not None:
            self.waiter.cancelled(self)
        return True

    def __await__(self) -> Generator[Any, None, R]:
        """Wait on the running event loop."""
        return asyncio.wrap_future(self).__await__()

    def _wait(self, timeout: float | None) -> float | None:
        """Wait where the messages come in; return what is left of the time for who waits otherwise."""
        if self.done() or self.waiter is None:
            return timeout
        self.waiter.wait_for(self, timeout)
        return timeout if timeout is None else 0.0


class OnFull(StrEnum):
    """What `tell` does where the callee's mailbox has no room for it."""

    WAIT = "wait"
    RAISE = "raise"


class Sender(Protocol):
    """What a ref needs to send a call; see `caller.Caller`."""

    def ask(
        self,
        name: str,
        method: Callable[..., Any],
        payload: Any,
        *,
        timeout_s: float,
        options: EndpointOptions,
        pinned: int | None,
        wants_reply: bool,
        only_now: bool,
    ) -> Reply[Any]:
        """Send a call from any thread."""
        ...

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, writable: bool) -> Any:
        """Make arguments ready to be sent."""
        ...

    def query(self, name: str, what: str, returns: Any, timeout_s: float) -> Reply[Any]:
        """Ask the I/O thread of an actor; any thread."""
        ...

    def incarnation_of(self, name: str) -> int | None:
        """Return the incarnation that takes calls now, if any."""
        ...


class Ref(Generic[A]):
    """A logical reference to an actor: calls go to whatever incarnation is up."""

    def __init__(
        self, name: str, sender: Sender, *, timeout_s: float | None = None, pinned: int | None = None
    ) -> None:
        self.name = name
        self._sender, self._timeout_s, self._pinned = sender, timeout_s, pinned

    def __repr__(self) -> str:
        pin = f", incarnation {self._pinned}" if self._pinned else ""
        return f"<ref {self.name}{pin}>"

    @property
    def incarnation(self) -> int | None:
        """The incarnation that takes calls now, if any."""
        return self._sender.incarnation_of(self.name)

    def within(self, timeout_s: float) -> "Ref[A]":
        """Return the same ref with another deadline for its calls, in seconds."""
        return Ref(self.name, self._sender, timeout_s=timeout_s, pinned=self._pinned)

    def pin(self) -> Self:
        """Return a ref to the current incarnation only; after a restart it raises `ActorRestarted`."""
        pinned = self._sender.incarnation_of(self.name)
        return cast(Self, Ref(self.name, self._sender, timeout_s=self._timeout_s, pinned=pinned))

    @overload
    def ask(
        self,
        method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Reply[R]: ...
    @overload
    def ask(
        self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Reply[R]: ...
    def ask(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Reply[Any]:
        """Send a call and return its reply.

        `timeout_s=` among the keywords is the deadline of this call (`within` is the typed way). A call that
        finds no room in the callee's mailbox waits for it within the deadline.

        Raises:
            TypeError: `method` is not an endpoint.
            SerializationError: an argument is neither plain data nor a typed record nor an array.
        """
        return self._send(method, args, kwargs, wants_reply=True)

    def tell(self, method: Callable[Concatenate[A, P], Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a call and forget it; a failure is logged by the callee and counted.

        `on_full="raise"` among the keywords refuses to wait for room in the callee's mailbox.

        Raises:
            MailboxFull: there is no room, also not among those that wait for it.
        """
        self._send(method, args, kwargs, wants_reply=False)

    def send_packed(self, method: Callable[..., Any], payload: Any, timeout_s: float | None) -> Reply[Any]:
        """Send a call whose arguments were packed by `pack`; see `fanout`."""
        options = _options(method)
        return self._sender.ask(
            self.name,
            method,
            payload,
            timeout_s=timeout_s or self._timeout_s or options.timeout_s,
            options=options,
            pinned=self._pinned,
            wants_reply=True,
            only_now=False,
        )

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make arguments ready to be sent to several actors."""
        return self._sender.pack(args, kwargs, writable=False)

    @property
    def control(self) -> "Control":
        """Questions that the actor's I/O thread answers, however busy its main thread is."""
        return Control(self.name, self._sender, self._timeout_s or QUERY_TIMEOUT_S)

    def _send(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, wants_reply: bool
    ) -> Reply[Any]:
        options = _options(method)
        timeout_s, only_now = None, False
        if kwargs:
            timeout_s = kwargs.pop("timeout_s", None)
            only_now = not wants_reply and OnFull(kwargs.pop("on_full", OnFull.WAIT)) is OnFull.RAISE
        return self._sender.ask(
            self.name,
            method,
            self._sender.pack(args, kwargs, writable=not options.idempotent),
            timeout_s=timeout_s or self._timeout_s or options.timeout_s,
            options=options,
            pinned=self._pinned,
            wants_reply=wants_reply,
            only_now=only_now,
        )


class Control:
    """See `Ref.control`. The actor's mailbox and main thread have no part in the answers."""

    def __init__(self, name: str, sender: Sender, timeout_s: float) -> None:
        self._name, self._sender, self._timeout_s = name, sender, timeout_s

    def ping(self) -> Reply[int]:
        """Ask for the actor's pid."""
        return self._ask("ping", int)

    def stack(self) -> Reply[str]:
        """Ask for the stacks of all its threads, as text."""
        return self._ask("stack", str)

    def status(self) -> Reply[dict[str, Any]]:
        """Ask what it does: method, seconds in it, mailbox, calls in flight, dead letters by reason."""
        return self._ask("status", dict[str, Any])

    def dead_letters(self) -> Reply[list[dict[str, str]]]:
        """Ask for the last messages that were not carried out: reason, sender, method, detail."""
        return self._ask("dead_letters", list[dict[str, str]])

    def _ask(self, what: str, returns: Any) -> Reply[Any]:
        return self._sender.query(self._name, what, returns, self._timeout_s)


def _options(method: Callable[..., Any]) -> EndpointOptions:
    options = options_of(method)
    if options is None:
        raise TypeError(f"{getattr(method, '__qualname__', method)} is not an @endpoint")
    return options
