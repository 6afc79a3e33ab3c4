"""How actors are called: `ref.ask(Counter.add, 4).result()`, `await ref.ask(...)`, `ref.tell(...)`."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from relax_actor.actor.base import Actor, EndpointOptions, options_of

A = TypeVar("A", bound=Actor)
R = TypeVar("R")
P = ParamSpec("P")


class Reply(Future[R], Generic[R]):
    """A call's answer to come: `.result()` in synchronous code, `await` in asynchronous code.

    It always ends: by the result, an `ActorError`, or the caller's deadline. Cancelling it drops the
    answer at once and never waits for the callee.
    """

    def __await__(self) -> Generator[Any, None, R]:
        """Wait on the running event loop."""
        return asyncio.wrap_future(self).__await__()


class Sender(Protocol):
    """What a ref needs to send a call; see `courier.Courier.ask`."""

    def ask(
        self,
        name: str,
        method: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        timeout_s: float,
        options: EndpointOptions,
        pinned: int | None,
        wants_reply: bool,
    ) -> Reply[Any]:
        """Send a call from any thread."""
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

        `timeout_s=` among the keywords is the deadline of this call (`within` is the typed way).

        Raises:
            TypeError: `method` is not an endpoint.
            SerializationError: an argument is neither plain data nor a typed record nor an array.
        """
        return self._send(method, args, kwargs, wants_reply=True)

    def tell(self, method: Callable[Concatenate[A, P], Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a call and forget it; a failure is logged by the callee and counted."""
        self._send(method, args, kwargs, wants_reply=False)

    def _send(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, wants_reply: bool
    ) -> Reply[Any]:
        options = options_of(method)
        if options is None:
            raise TypeError(f"{getattr(method, '__qualname__', method)} is not an @endpoint")
        timeout_s = kwargs.pop("timeout_s", None) or self._timeout_s or options.timeout_s
        return self._sender.ask(
            self.name,
            method,
            (args, kwargs),
            timeout_s=timeout_s,
            options=options,
            pinned=self._pinned,
            wants_reply=wants_reply,
        )
