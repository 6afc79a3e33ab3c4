"""Ray Core actors: `num_cpus=0`, one worker process each, without the dashboard."""

import os
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray  # type: ignore[import-not-found] # in its own environment

from actors.engine import Engine
from actors.work import Work

ONCE = ray.remote(num_cpus=0)(Work)
RESTARTED = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Work)


class Ray(Engine):
    """`ray.init` on this machine; calls by `ray.get`."""

    version = str(ray.__version__)
    settle_s = 1.0  # it takes so long until killed workers are gone and idle ones started

    async def start(self) -> None:
        ray.init(address="local", include_dashboard=False, logging_level="warning")

    async def spawn(self, count: int, *, restartable: bool = False) -> list[Any]:
        actor = RESTARTED if restartable else ONCE
        return [actor.remote() for _ in range(count)]

    def submit(self, actor: Any, method: str, *args: Any) -> Any:
        return getattr(actor, method).remote(*args)

    async def wait(self, pending: Any, timeout_s: float | None = None) -> Any:
        return ray.get(pending, timeout=timeout_s)

    async def broadcast(self, actors: list[Any], array: Any) -> list[int]:
        shared = ray.put(array)
        sums: list[int] = ray.get([actor.consume.remote(shared) for actor in actors])
        return sums

    async def drop(self, actors: list[Any]) -> None:
        for actor in actors:
            ray.kill(actor)

    async def stop(self) -> None:
        ray.shutdown()


def engine(_name: str) -> Engine:
    return Ray()
