"""Calls to an SGLang server: one I/O thread with a loop of its own, and plain functions around it.

Every call has a deadline, none goes through a proxy, and all of them end at once when the server is known
to be gone (`fail`), also those that were waiting for a long answer.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp
import msgspec

from relax_actor.engines.sglang.errors import DeadlineError, ServerError, ServerGoneError

T = TypeVar("T")

KEEP_ALIVE_S = 300.0
"""Shorter than the server's own, so that it never closes a connection that is about to be used."""

_JSON = {"Content-Type": "application/json"}


class Client:
    """Speaks to one server. Safe to use from any thread.

    Args:
        url: of the server, such as `http://127.0.0.1:40001`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._gone: ServerGoneError | None = None
        self._calls: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._session: aiohttp.ClientSession
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="sglang-client", daemon=True)
        self._thread.start()
        ready.wait()

    def post(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """Post JSON and return the answer, out of JSON where it is any.

        Raises:
            ServerError: it answered with another status than 200.
            ServerGoneError: it is gone, or closed the connection.
            DeadlineError: it did not answer in time.
        """
        return self.start(path, body, deadline_s=deadline_s).result()

    def get(self, path: str, *, deadline_s: float) -> Any:
        """Get; as `post`."""
        return self._submit(path, deadline_s, lambda: self._exchange("GET", path, b"")).result()

    def start(self, path: str, body: Any = None, *, deadline_s: float) -> "Future[Any]":
        """Post without waiting; the future has what `post` returns or raises."""
        data = msgspec.json.encode({} if body is None else body)
        return self._submit(path, deadline_s, lambda: self._exchange("POST", path, data))

    def stream(
        self, path: str, body: Any, *, deadline_s: float, on_event: Callable[[Any], None]
    ) -> "Future[None]":
        """Post; call `on_event` in the I/O thread with each event of the answer, a stream of them."""
        data = msgspec.json.encode(body)
        return self._submit(path, deadline_s, lambda: self._events(path, data, on_event))

    def fail(self, error: ServerGoneError) -> None:
        """End all calls, and those to come, with an error: the server is known to be gone."""
        with self._lock:
            self._gone = self._gone or error
            calls = list(self._calls)
        for call in calls:
            call.cancel()  # of the coroutine; `_submit` turns that into the error

    def close(self) -> None:
        """End all calls and the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self.fail(ServerGoneError("the client was closed"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # -- the I/O thread ---------------------------------------------------------------------------

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(ready.set)
        self._session = self._loop.run_until_complete(_open_session())
        self._loop.run_forever()
        self._loop.run_until_complete(self._shut())
        self._loop.close()

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    def _submit(self, path: str, deadline_s: float, call: Callable[[], Awaitable[T]]) -> "Future[T]":
        outer: Future[T] = Future()
        inner = asyncio.run_coroutine_threadsafe(self._guarded(path, deadline_s, call), self._loop)
        with self._lock:
            self._calls.add(inner)
            gone = self._gone
        inner.add_done_callback(lambda _: self._ended(inner, outer))
        if gone is not None:
            inner.cancel()
        return outer

    def _ended(self, inner: "Future[T]", outer: "Future[T]") -> None:
        with self._lock:
            self._calls.discard(inner)
        if inner.cancelled():
            outer.set_exception(self._gone or ServerGoneError("the call was cancelled"))
        elif error := inner.exception():
            outer.set_exception(error)
        else:
            outer.set_result(inner.result())

    async def _guarded(self, path: str, deadline_s: float, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await call()
        except TimeoutError as error:
            raise DeadlineError(path, deadline_s) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            fact = f"{type(error).__name__}: {error}"
            raise ServerGoneError(f"SGLang closed the connection of {path}: {fact}") from error

    async def _exchange(self, method: str, path: str, data: bytes) -> Any:
        async with self._session.request(method, self.url + path, data=data, headers=_JSON) as response:
            return _parsed(path, response.status, await response.read())

    async def _events(self, path: str, data: bytes, on_event: Callable[[Any], None]) -> None:
        async with self._session.post(self.url + path, data=data, headers=_JSON) as response:
            if response.status != 200 or response.content_type == "application/json":
                on_event(_parsed(path, response.status, await response.read()))
                return
            async for event in _server_sent(response.content):
                on_event(_event(path, event))


async def _open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=1 << 20,
        trust_env=False,
    )


async def _server_sent(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events; a stream that is cut off before its end is an error."""
    rest = b""
    async for part in content.iter_any():
        rest += part
        *events, rest = rest.split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data:
                yield data
    raise aiohttp.ClientPayloadError("the stream ended in the middle")


def _event(path: str, data: bytes) -> Any:
    """Parse an event; SGLang says in one what would be a status, once the answer has begun."""
    event = msgspec.json.decode(data)
    if isinstance(event, dict) and (error := event.get("error")):
        status = error.get("code", 500) if isinstance(error, dict) else 500
        raise ServerError(path, status if isinstance(status, int) else 500, str(error))
    return event


def _parsed(path: str, status: int, data: bytes) -> Any:
    text: Any = data.decode(errors="replace")
    if status != 200:
        raise ServerError(path, status, text)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(data)
    return text
