"""Monarch (torchmonarch) actors, one proc each; `run` makes its second name poll for deaths each 100 ms."""

import contextlib
import importlib.metadata
import itertools
import time
from typing import Any

import monarch.actor  # type: ignore[import-not-found] # in its own environment
from monarch.actor import Actor, endpoint, this_host

from actors.engine import REVIVAL_DEADLINE_S, Engine
from actors.work import METHODS, Work


class MonarchWork(Actor):  # type: ignore[misc] # untyped here
    """The work as an actor of Monarch."""

    ping, echo, sleep, consume, make, give, hold, child, boom, boom_unsendable = (
        endpoint(getattr(Work, method)) for method in METHODS
    )


class Monarch(Engine):
    """Procs of this host; an actor is (its procs, its mesh, its rank)."""

    version = importlib.metadata.version("torchmonarch")
    kill_waits_s = (0.5, 2.1, 3.9, 6.2, 8.3)  # its poll has a phase: spread over it

    def __init__(self) -> None:
        self._ids = itertools.count()

    async def start(self) -> None:
        monarch.actor.unhandled_fault_hook = lambda _failure: None  # its own ends this process
        monarch.actor.context()

    async def spawn(self, count: int, *, restartable: bool = False) -> list[Any]:
        del restartable  # it has no restart: see `revived`
        number = next(self._ids)
        procs = this_host().spawn_procs(per_host={"gpus": count}, name=f"p{number}")
        mesh = procs.spawn(f"w{number}", MonarchWork)
        return [(procs, mesh.slice(gpus=rank)) for rank in range(count)]

    def submit(self, actor: Any, method: str, *args: Any) -> Any:
        return getattr(actor[1], method).call_one(*args)

    async def wait(self, pending: Any, timeout_s: float | None = None) -> Any:
        return pending.get(timeout=timeout_s)

    async def revived(self, actor: Any, dead: int) -> None:
        """Its owner hears of the failure from a failed call, and spawns anew."""
        deadline = time.perf_counter() + REVIVAL_DEADLINE_S
        while time.perf_counter() < deadline:
            try:
                if self.submit(actor, "ping").get(timeout=REVIVAL_DEADLINE_S) != dead:
                    return
            except Exception:  # noqa: BLE001 - dead: that is what is waited for
                actor = (await self.spawn(1))[0]
        raise TimeoutError(f"no other actor answered in {REVIVAL_DEADLINE_S:g} s")

    async def drop(self, actors: list[Any]) -> None:
        for procs in {id(actor[0]): actor[0] for actor in actors}.values():
            with contextlib.suppress(Exception):  # a dead one cannot be stopped
                procs.stop("bench").get()

    async def stop(self) -> None:
        monarch.actor.shutdown_context().get()


def engine(_name: str) -> Engine:
    return Monarch()
