"""xoscar actors, one sub pool (an OS process) each, the driver on uvloop as its sub pools are."""

import asyncio
import contextlib
import importlib.metadata
import itertools
from typing import Any

import uvloop  # type: ignore[import-not-found] # in its own environment
import xoscar  # type: ignore[import-not-found] # the same

from actors.engine import Engine, LoopEngine
from actors.work import Work


class XoscarWork(Work, xoscar.Actor):  # type: ignore[misc] # untyped here
    """The work as an actor of xoscar."""


class Xoscar(LoopEngine):
    """A main pool in this process; a sub pool an actor."""

    version = importlib.metadata.version("xoscar")
    loop_factory = staticmethod(uvloop.new_event_loop)

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._pool: Any = None
        self._addresses: dict[Any, str] = {}

    async def start(self) -> None:
        self._pool = await xoscar.create_actor_pool("127.0.0.1", n_process=0, auto_recover="actor")

    async def spawn(self, count: int, *, restartable: bool = False) -> list[Any]:
        if restartable:
            return [await self._spawn_recovered()]
        return list(await asyncio.gather(*(self._spawn() for _ in range(count))))

    async def _spawn(self) -> Any:
        # No env=: all sub pools' settings must fit one small block of shared memory.
        address = await self._pool.append_sub_pool(modules=[__name__])
        return await self._create(address)

    async def _spawn_recovered(self) -> Any:
        """Recovery works only for the sub pools that the main pool started itself."""
        await self._pool.stop()
        self._pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1, auto_recover="actor")
        return await self._create(next(iter(self._pool.sub_processes)))

    async def _create(self, address: str) -> Any:
        actor = await xoscar.create_actor(XoscarWork, address=address, uid=f"w{next(self._ids)}")
        self._addresses[actor.uid] = address
        return actor

    def submit(self, actor: Any, method: str, *args: Any) -> Any:
        return asyncio.ensure_future(getattr(actor, method)(*args))

    async def wait(self, pending: Any, timeout_s: float | None = None) -> Any:
        return await (pending if timeout_s is None else asyncio.wait_for(pending, timeout_s))

    async def call(self, actor: Any, method: str, *args: Any) -> Any:
        return await getattr(actor, method)(*args)

    async def drop(self, actors: list[Any]) -> None:
        for actor in actors:
            with contextlib.suppress(Exception):  # a dead one cannot be removed
                await self._pool.remove_sub_pool(self._addresses.pop(actor.uid), force=True)

    async def stop(self) -> None:
        await self._pool.stop()


def engine(_name: str) -> Engine:
    return Xoscar()
