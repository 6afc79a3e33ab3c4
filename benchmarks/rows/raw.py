"""The floor: rows copied into memory that both sides have mapped, and a pipe that says where they are.

Nothing is acknowledged, nothing survives, memory is a ring as large as the credit window allows.
"""

import mmap
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np

from rows.engine import Consumer, Engine, Producer
from rows.work import FIELDS, GET_ROWS, IMAGE_BYTES, PUT_ROWS, Plan, Row, pack

_TEXT_BYTES = 112 << 10  # the longest row


def _ring(plan: Plan, index: int) -> tuple[Any, int]:
    row_bytes = _TEXT_BYTES + (IMAGE_BYTES if plan.media else 0)
    batches = plan.window // PUT_ROWS + 1
    nbytes = row_bytes * PUT_ROWS * batches
    path = Path(plan.folder) / f"ring{index}"
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8), row_bytes * PUT_ROWS


class _Producer(Producer):
    def __init__(self, queue: Any, plan: Plan, index: int) -> None:
        self._queue, self._index, self._turn = queue, index, 0
        self._ring, self._batch_bytes = _ring(plan, index)
        self._batches = len(self._ring) // self._batch_bytes
        self._ring[::4096] = 0

    def put(self, rows: list[Row], first: int) -> None:  # noqa: ARG002 - the interface
        at = (self._turn % self._batches) * self._batch_bytes
        self._turn += 1
        places = []
        for row in rows:
            place = {}
            for name in (*FIELDS, *(["image"] if "image" in row else [])):
                array = row[name]
                place[name] = (at, array.dtype.str, array.shape)
                self._ring[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
                at += -(-array.nbytes // 64) * 64
            places.append(place)
        for start in range(0, len(places), GET_ROWS):
            self._queue.put((self._index, places[start : start + GET_ROWS]))


class _Consumer(Consumer):
    def __init__(self, queue: Any, plan: Plan) -> None:
        self._queue, self._stage = queue, dict[str, Any]()
        self._rings = [_ring(plan, index)[0] for index in range(plan.producers)]

    def get(self) -> tuple[Row, float | None]:
        self._queue._reader.poll(60)  # noqa: SLF001 - so that waiting is not counted
        since = time.perf_counter()
        index, places = self._queue.get()
        ring = self._rings[index]
        got = [{name: _view(ring, *place) for name, place in row.items()} for row in places]
        return pack(got, self._stage), time.perf_counter() - since


def _view(ring: Any, at: int, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.ndarray(shape, dtype, buffer=ring.data, offset=at)


class Raw(Engine):
    """A ring for each producer, a pipe for all."""

    version = "shared memory"

    def start(self, plan: Plan) -> Any:  # noqa: ARG002 - the interface
        return multiprocessing.get_context("spawn").SimpleQueue()

    def producer(self, shared: Any, plan: Plan, index: int) -> Producer:
        return _Producer(shared, plan, index)

    def consumer(self, shared: Any, plan: Plan) -> Consumer:
        return _Consumer(shared, plan)


def engine() -> Engine:
    """Return the engine."""
    return Raw()
