"""One call to many actors: `gather` waits for all, `stream` gives answers as they come.

The arguments are packed once, and large arrays among them written once into shared memory for all. Where
actors fail, those that failed alike are one error with the positions of exactly those refs.
"""

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from relax_actor.actor.base import Actor
from relax_actor.actor.ref import Ref, Reply, Waiter
from relax_actor.errors import ActorDied, MeshError, RemoteError

A = TypeVar("A", bound=Actor)
R = TypeVar("R")
P = ParamSpec("P")


@overload
def gather(
    refs: Sequence[Ref[A]],
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Reply[list[R]]: ...
@overload
def gather(
    refs: Sequence[Ref[A]], method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs
) -> Reply[list[R]]: ...
def gather(refs: Sequence[Ref[Any]], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Reply[Any]:
    """Ask every ref the same; the reply is the list of results, in the order of the refs.

    The first failure ends it with `MeshError`, and the calls that are not answered are cancelled.
    """
    return _All(_ask_all(refs, method, args, kwargs), fail_fast=True).reply


@overload
def gather_all(
    refs: Sequence[Ref[A]],
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Reply[list[R]]: ...
@overload
def gather_all(
    refs: Sequence[Ref[A]], method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs
) -> Reply[list[R]]: ...
def gather_all(refs: Sequence[Ref[Any]], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Reply[Any]:
    """Do as `gather` does, but wait for every answer before any failure is raised."""
    return _All(_ask_all(refs, method, args, kwargs), fail_fast=False).reply


@overload
def stream(
    refs: Sequence[Ref[A]],
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> "Stream[R]": ...
@overload
def stream(
    refs: Sequence[Ref[A]], method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs
) -> "Stream[R]": ...
def stream(refs: Sequence[Ref[Any]], method: Callable[..., Any], *args: Any, **kwargs: Any) -> "Stream[Any]":
    """Ask every ref the same; iterate, with `for` or `async for`, over positions and results as they come.

    The first failure raises `MeshError`, and the calls that are not answered are cancelled.
    """
    return Stream(_ask_all(refs, method, args, kwargs))


def mesh_error(errors: Sequence[tuple[int, BaseException]], size: int) -> MeshError:
    """Group errors that are alike.

    Args:
        errors: position and error, in the order in which they were heard of; at least one.
        size: how many were asked.
    """
    groups: dict[object, list[int]] = {}
    first: dict[object, Exception] = {}
    for position, error in errors:
        key = _likeness(error)
        groups.setdefault(key, []).append(position)
        if isinstance(error, Exception):
            first.setdefault(key, error)
    for key, error in first.items():
        error.add_note(f"of {_ranks_text(groups[key])}")
    return MeshError(f"{len(errors)} of {size} actors failed", list(first.values()), list(groups.values()))


class _All:
    """The one reply of many."""

    def __init__(self, parts: list[Reply[Any]], *, fail_fast: bool) -> None:
        self.reply: Reply[Any] = Reply()
        self._parts, self._fail_fast = parts, fail_fast
        self._failed: list[tuple[int, BaseException]] = []
        self._left = len(parts)
        self._lock = threading.Lock()
        if not parts:
            self.reply.end([], None)
            return
        self.reply.call, self.reply.waiter = parts[0].call, _waiter_of(parts, self._cancel)
        for position, part in enumerate(parts):
            part.add_done_callback(lambda part, position=position: self._ended(position, part))  # type: ignore[misc]  # a default binds early

    def _ended(self, position: int, part: Reply[Any]) -> None:
        if part.cancelled():
            return
        with self._lock:
            self._left -= 1
            if (error := part.exception()) is not None:
                self._failed.append((position, error))
            is_over = self._left == 0 or (self._fail_fast and bool(self._failed))
            if not is_over or self.reply.done():
                return
            failed = mesh_error(self._failed, len(self._parts)) if self._failed else None
        results = None if failed else [each.result() for each in self._parts]
        self.reply.end(results, failed)
        self._cancel()

    def _cancel(self) -> None:
        for part in self._parts:
            part.cancel()


class Stream(Generic[R]):
    """Answers as they come; see `stream`."""

    def __init__(self, parts: list[Reply[R]]) -> None:
        self._parts, self._left = parts, len(parts)
        self._arrived: deque[int] = deque()
        self._next: Reply[None] | None = None
        for position, part in enumerate(parts):
            part.add_done_callback(lambda _part, position=position: self._ended(position))  # type: ignore[misc]  # a default binds early

    def __iter__(self) -> Iterator[tuple[int, R]]:
        while self._left:
            while not self._arrived:
                self._arrival().result()
            yield self._take()

    async def __aiter__(self) -> AsyncIterator[tuple[int, R]]:
        while self._left:
            while not self._arrived:
                await self._arrival()
            yield self._take()

    def _ended(self, position: int) -> None:
        self._arrived.append(position)
        if (waiting := self._next) is not None and not waiting.done():
            waiting.end(None, None)

    def _arrival(self) -> Reply[None]:
        """Return a reply that ends when the next part does."""
        reply: Reply[None] = Reply()
        waits_for = next((part for part in self._parts if not part.done()), self._parts[0])
        reply.call, reply.waiter = waits_for.call, _waiter_of([waits_for], lambda: None)
        self._next = reply
        if self._arrived and not reply.done():  # it came before it could see this reply
            reply.end(None, None)
        return reply

    def _take(self) -> tuple[int, R]:
        position = self._arrived.popleft()
        self._left -= 1
        error = self._parts[position].exception()
        if error is not None:
            for part in self._parts:
                part.cancel()
            raise mesh_error([(position, error)], len(self._parts))
        return position, self._parts[position].result()


class _Together:
    """Waits where one part does, and cancels all."""

    def __init__(self, waiter: Waiter, cancel: Callable[[], None]) -> None:
        self._waiter, self._cancel = waiter, cancel

    def wait_for(self, reply: Reply[Any], timeout_s: float | None) -> None:
        self._waiter.wait_for(reply, timeout_s)

    def cancelled(self, _reply: Reply[Any]) -> None:
        self._cancel()


def _waiter_of(parts: Sequence[Reply[Any]], cancel: Callable[[], None]) -> Waiter | None:
    waiter = parts[0].waiter
    return None if waiter is None else _Together(waiter, cancel)


def _ask_all(
    refs: Sequence[Ref[Any]], method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Reply[Any]]:
    if not refs:
        return []
    timeout_s = kwargs.pop("timeout_s", None)
    payload = refs[0].pack(args, kwargs)
    try:
        return [ref.send_packed(method, payload.share(), timeout_s) for ref in refs]
    finally:
        payload.release()


def _likeness(error: BaseException) -> object:
    """Return what is equal for errors that are told once."""
    if isinstance(error, RemoteError):
        return error.remote_traceback
    if isinstance(error, ActorDied):
        return ActorDied, error.reason
    return type(error), getattr(error, "method", str(error))


def _ranks_text(ranks: Sequence[int]) -> str:
    """Write positions as ranges: `ranks 0-2, 5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
