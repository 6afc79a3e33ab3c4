"""The rows: made, put with an external credit, got as packed micro-batches, each checked off exactly once.

A row is int64 tokens (256 of a prompt and 512 to 8192 of a response, 29 KB with all), float32 log-probs, a
uint8 mask and a reward; a `media` row has 10 MB of float32 image more. Producers put 32 at once. The consumer
takes 8 and always ends with the same product, a packed micro-batch in private memory: reading in place cannot
cheat.
"""

import json
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PUT_ROWS = 32
GET_ROWS = 8
IMAGE_WIDTH = 1176
IMAGE_BYTES = 10 << 20
FIELDS = ("tokens", "logprobs", "mask")
READ = ("tokens", "logprobs")

Row = dict[str, Any]
_CONSUMED, _GO, _DONE, _READY, _SLOTS = 0, 1, 2, 3, 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One unit's work."""

    folder: str
    producers: int
    rows: int
    window: int  # rows that may be put and not yet packed
    media: bool = False
    warm_rows: int = 256  # not measured


class Board:
    """A small file mapped by every process: who is ready, the credit, when each row was put."""

    def __init__(self, plan: Plan) -> None:
        path = Path(plan.folder) / "board"
        nbytes = (_SLOTS + plan.rows) * 8
        if not path.exists():
            path.write_bytes(bytes(nbytes))
        with path.open("r+b") as file:
            words = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.int64)
        self._words, self.put_ns = words[:_SLOTS], words[_SLOTS:]

    @property
    def consumed(self) -> int:
        return int(self._words[_CONSUMED])

    @consumed.setter
    def consumed(self, rows: int) -> None:
        self._words[_CONSUMED] = rows

    def ready(self, number: int) -> None:
        self._words[_READY + number] = 1

    def all_ready(self, count: int) -> bool:
        return bool(self._words[_READY : _READY + count].all())

    def go(self) -> None:
        self._words[_GO] = 1

    def await_go(self) -> None:
        while not self._words[_GO]:
            time.sleep(0.002)

    def done(self) -> None:
        self._words[_DONE] = 1

    @property
    def is_done(self) -> bool:
        return bool(self._words[_DONE])


def rows(count: int, seed: int, *, media: bool) -> list[Row]:
    """Return rows of the workload."""
    rng = np.random.default_rng(seed)
    images = [
        rng.standard_normal((IMAGE_BYTES // 4 // IMAGE_WIDTH, IMAGE_WIDTH), dtype=np.float32)
        for _ in range(4 if media else 0)
    ]
    return [_row(rng, images, number) for number in range(count)]


def _row(rng: np.random.Generator, images: Sequence[Any], number: int) -> Row:
    length = 256 + int(np.clip(512 + rng.exponential(1536), 512, 8192))
    row = {
        "tokens": rng.integers(0, 151_000, length),
        "logprobs": rng.standard_normal(length, dtype=np.float32),
        "mask": (np.arange(length) >= 256).astype(np.uint8),
        "reward": np.float32(rng.random()),
    }
    return row | ({"image": images[number % len(images)]} if images else {})


Parts = dict[str, list[float]]
"""What an end's time went into, in the units of the names."""


def produce(
    plan: Plan,
    index: int,
    put: Callable[[list[Row], int], None],
    parts: Parts,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Put this producer's share of the rows, each batch as soon as there is credit for it."""
    board = Board(plan)
    pool = [rows(PUT_ROWS, 1000 * index + k, media=plan.media) for k in range(1 if plan.media else 8)]
    took: list[float] = []
    board.ready(1 + index)
    board.await_go()
    for turn, batch in enumerate(range(index, plan.rows // PUT_ROWS, plan.producers)):
        first = batch * PUT_ROWS
        while first + PUT_ROWS - board.consumed > plan.window:
            time.sleep(0.0002)
        before()
        chosen = pool[turn % len(pool)]
        _sign(chosen, first)
        board.put_ns[first : first + PUT_ROWS] = time.monotonic_ns()
        since = time.perf_counter()
        put(chosen, first)
        took.append((time.perf_counter() - since) * 1e3)
        after()
    _save(plan, f"producer{index}", {"put_ms": took[len(took) // 8 :]} | _named(parts))


def consume(
    plan: Plan, get: Callable[[], tuple[Row, float | None]], after: Callable[[], None], parts: Parts
) -> None:
    """Get every row; `get` returns a packed micro-batch and its own time, None where it had to wait."""
    board, seen = Board(plan), np.zeros(plan.rows, bool)
    took: list[float] = []
    ages: list[float] = []
    count, warm, since = 0, 0, 0.0
    board.ready(0)
    board.await_go()
    while count < plan.rows:
        packed, own_s = get()
        ids = _checked(packed, seen)
        after()
        if since:
            took += [] if own_s is None else [own_s * 1e3]
            ages += ((time.monotonic_ns() - board.put_ns[ids]) / 1e6).tolist()
        count += len(ids)
        board.consumed = count
        if not since and count >= plan.warm_rows:
            since, warm = time.perf_counter(), count
    rate = (count - warm) / (time.perf_counter() - since)
    _save(plan, "consumer", {"rows_per_s": rate, "get_ms": took, "age_ms": ages} | _named(parts))
    board.done()


def pack(got: Sequence[Row], stage: dict[str, Any]) -> Row:
    """Return rows end to end in memory of this process, which the next call uses again."""
    names = [*READ, *(["image"] if "image" in got[0] else [])]
    packed = {name: _joined(name, [row[name] for row in got], stage) for name in names}
    packed["ends"] = np.cumsum([len(row["tokens"]) for row in got])
    return packed


def copied(name: str, values: Any, stage: dict[str, Any]) -> Any:
    """Return values in memory of this process, which the next call uses again."""
    return _joined(name, [values], stage)


def _named(parts: Parts) -> dict[str, float]:
    return {f"of_{name}": statistics.median(took) for name, took in parts.items() if took}


def _joined(name: str, arrays: list[Any], stage: dict[str, Any]) -> Any:
    need = sum(len(each) for each in arrays)
    if name not in stage or len(stage[name]) < need:
        stage[name] = np.zeros((need * 3 // 2, *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=stage[name][:need])


def _sign(batch: list[Row], first: int) -> None:
    for number, row in enumerate(batch, first):
        row["tokens"][0], row["tokens"][-1] = number, number ^ 0x5A5A
        row["logprobs"][0] = -float(number % 4093)


def _checked(packed: Row, seen: Any) -> Any:
    ends = packed["ends"]
    starts = np.concatenate([[0], ends[:-1]])
    ids = packed["tokens"][starts].astype(np.int64)
    whole = (packed["tokens"][ends - 1] == ids ^ 0x5A5A) & (packed["logprobs"][starts] == -(ids % 4093))
    if not whole.all() or seen[ids].any():
        raise AssertionError(f"rows {ids.tolist()} are torn or came twice")
    seen[ids] = True
    return ids


def _save(plan: Plan, name: str, facts: dict[str, Any]) -> None:
    (Path(plan.folder) / f"{name}.json").write_text(json.dumps(facts))
