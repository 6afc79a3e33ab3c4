"""Ray: the rows of a micro-batch are one object, their references pass through an asyncio actor."""

import asyncio
import os
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray  # type: ignore[import-not-found] # in its own environment

from rows.engine import Consumer, Engine, Producer
from rows.work import GET_ROWS, Plan, Row, pack

_NAMESPACE = "rows"


class _References:
    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    async def put(self, references: list[Any]) -> None:
        for each in references:
            self._queue.put_nowait(each)

    async def get(self) -> list[Any]:
        return [await self._queue.get()]  # in a list, or Ray would fetch it for us


class _Producer(Producer):
    def __init__(self, address: str) -> None:
        self._queue = _connected(address)

    def put(self, rows: list[Row], first: int) -> None:  # noqa: ARG002 - the interface
        references = [ray.put(rows[at : at + GET_ROWS]) for at in range(0, len(rows), GET_ROWS)]
        ray.get(self._queue.put.remote(references))


class _Consumer(Consumer):
    def __init__(self, address: str) -> None:
        self._queue, self._stage = _connected(address), dict[str, Any]()
        self._next = self._queue.get.remote()  # the next one is always asked for already

    def get(self) -> tuple[Row, float | None]:
        ray.wait([self._next], timeout=60)
        since = time.perf_counter()
        (reference,) = ray.get(self._next)
        self._next = self._queue.get.remote()
        return pack(ray.get(reference), self._stage), time.perf_counter() - since


def _connected(address: str) -> Any:
    ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="error")
    return ray.get_actor("rows")


class Ray(Engine):
    """The object store and one actor."""

    version = str(ray.__version__)

    def start(self, plan: Plan) -> Any:
        store_bytes = (6 << 30) if plan.media else (1 << 30)
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=store_bytes,
            log_to_driver=False,
            logging_level="error",
            namespace=_NAMESPACE,
        )
        actor = ray.remote(num_cpus=0, max_concurrency=64)(_References)
        self._actor = actor.options(name="rows").remote()
        ray.get(self._actor.put.remote([]))
        return context.address_info["gcs_address"]

    def stop(self) -> None:
        ray.shutdown()

    def producer(self, shared: Any, plan: Plan, index: int) -> Producer:  # noqa: ARG002 - the interface
        return _Producer(shared)

    def consumer(self, shared: Any, plan: Plan) -> Consumer:  # noqa: ARG002 - the interface
        return _Consumer(shared)


def engine() -> Engine:
    """Return the engine."""
    return Ray()
