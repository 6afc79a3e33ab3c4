"""`multiprocessing.Queue`: one pickle a micro-batch; a put is not acknowledged."""

import multiprocessing
import time
from typing import Any

from rows.engine import Consumer, Engine, Producer
from rows.work import GET_ROWS, Plan, Row, pack


class _Producer(Producer):
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, rows: list[Row], first: int) -> None:  # noqa: ARG002 - the interface
        for at in range(0, len(rows), GET_ROWS):
            # Its thread pickles later, and the rows are used again.
            self._queue.put([{k: v.copy() for k, v in row.items()} for row in rows[at : at + GET_ROWS]])


class _Consumer(Consumer):
    def __init__(self, queue: Any) -> None:
        self._queue, self._stage = queue, dict[str, Any]()

    def get(self) -> tuple[Row, float | None]:
        self._queue._reader.poll(60)  # noqa: SLF001 - so that waiting is not counted
        since = time.perf_counter()
        return pack(self._queue.get(), self._stage), time.perf_counter() - since


class MpQueue(Engine):
    """One queue for all."""

    version = "stdlib"

    def start(self, plan: Plan) -> Any:  # noqa: ARG002 - the interface
        return multiprocessing.get_context("spawn").Queue()

    def producer(self, shared: Any, plan: Plan, index: int) -> Producer:  # noqa: ARG002 - the interface
        return _Producer(shared)

    def consumer(self, shared: Any, plan: Plan) -> Consumer:  # noqa: ARG002 - the interface
        return _Consumer(shared)


def engine() -> Engine:
    """Return the engine."""
    return MpQueue()
