"""What the harness needs of an engine; each engine's module has a subclass and a function `engine()`."""

import abc
import asyncio
import contextlib
import importlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

MODULES = {
    "ours": "actors.ours",
    "ours_torch": "actors.ours",
    "raw": "actors.raw",
    "ray": "actors.ray_peer",
    "xoscar": "actors.xoscar_peer",
    "monarch": "actors.monarch_peer",
    "monarch_tuned": "actors.monarch_peer",
}
"""Where each engine is; a second name is the same engine with another setting."""

REVIVAL_DEADLINE_S = 60.0

Facts = dict[str, Any]
"""What a test found, by metric: a number, a list of samples, or a text."""


class Engine(abc.ABC):
    """One engine, driven as its users drive it, by default blocking.

    Actors and pending calls are whatever it makes of them.
    """

    version = ""
    settle_s = 0.2
    """How long it is left alone after actors were dropped, so that their end is not part of what is next."""
    kill_waits_s: tuple[float, ...] = (0.5,) * 5
    """How long a call has been pending when its actor is killed; one kill each."""
    restarts = 4
    big_kills = 3

    @abc.abstractmethod
    async def start(self) -> None:
        """Bring the engine up, without actors."""

    @abc.abstractmethod
    async def spawn(self, count: int, *, restartable: bool = False) -> list[Any]:
        """Start actors, each a process of its own; need not wait until they answer."""

    @abc.abstractmethod
    def submit(self, actor: Any, method: str, *args: Any) -> Any:
        """Send a call; return what `wait` takes."""

    @abc.abstractmethod
    async def wait(self, pending: Any, timeout_s: float | None = None) -> Any:
        """Return a call's result or raise its error."""

    @abc.abstractmethod
    async def drop(self, actors: list[Any]) -> None:
        """End actors by the engine's own means; those that are dead are no error."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End everything, the engine included."""

    async def call(self, actor: Any, method: str, *args: Any) -> Any:
        """Send a call and wait for it."""
        return await self.wait(self.submit(actor, method, *args))

    async def call_within(self, timeout_s: float, actor: Any, method: str) -> Any:
        """Call with the engine's own deadline."""
        return await self.wait(self.submit(actor, method), timeout_s)

    async def call_each(self, actors: list[Any], method: str) -> list[Any]:
        """Call all actors at once; return their results in order."""
        pending = [self.submit(actor, method) for actor in actors]
        return [await self.wait(each) for each in pending]

    async def dismiss(self, actors: list[Any]) -> None:
        """Drop actors and let the engine settle."""
        await self.drop(actors)
        await self.pause(self.settle_s)

    async def broadcast(self, actors: list[Any], array: Any) -> list[int]:
        """Have each actor `consume` the same array, in the engine's best way."""
        pending = [self.submit(actor, "consume", array) for actor in actors]
        return [await self.wait(each) for each in pending]

    async def revived(self, actor: Any, dead: int) -> None:
        """Return once a restarted actor answers with another pid than `dead`."""
        deadline = time.perf_counter() + REVIVAL_DEADLINE_S
        while time.perf_counter() < deadline:
            with contextlib.suppress(Exception):
                if await self.call_within(5.0, actor, "ping") != dead:
                    return
            await self.pause(0.002)
        raise TimeoutError(f"no other incarnation answered in {REVIVAL_DEADLINE_S:g} s")

    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop: see `run`

    def run(self, tests: Coroutine[Any, Any, None]) -> None:
        """Drive the tests to their end. A blocking engine never suspends, and needs no event loop."""
        try:
            tests.send(None)
        except StopIteration:
            return
        raise RuntimeError(f"{type(self).__name__} has awaited something without an event loop")


class LoopEngine(Engine):
    """An engine whose users have an event loop."""

    loop_factory: Callable[[], asyncio.AbstractEventLoop] = staticmethod(asyncio.new_event_loop)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run(self, tests: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            runner.run(tests)


def load(name: str) -> Engine:
    """Import and return an engine by its name."""
    engine = importlib.import_module(MODULES[name]).engine(name)
    if not isinstance(engine, Engine):
        raise TypeError(f"{MODULES[name]}.engine() returned {type(engine).__name__}")
    return engine
