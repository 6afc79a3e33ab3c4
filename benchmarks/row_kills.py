"""SIGKILL for a consumer of a row queue, again and again, at moments nobody chose.

    python benchmarks/row_kills.py --kills 200

Three consumers share the rows of a producer that never stops. One of them that is at work is killed, and
every tenth time the queue itself. At the end: rows lost, rows whose acknowledgement was accepted twice, and
how long it took until somebody else had what the dead one had in its hands, in ms from the kill. A consumer
writes down what it gets and what became of its acknowledgements; the account of the queue stands beside that.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import spread, write

from relax_actor import Actor, Backoff, ChildSpec, Intensity, Supervisor, SupervisorSpec, endpoint
from relax_actor.row_queue import ConsumerGroup, QueueSpec, RowConsumer, RowProducer, RowQueue
from relax_actor.transfer_queue.records import Put

PUT_ROWS, GET_ROWS, CONSUMERS = 8, 4, 3
SPEC = QueueSpec(
    fields=("number",),
    groups=(ConsumerGroup(name="train", needs=("number",), max_attempts=1000),),
    max_rows=64,
)


class Producer(Actor):
    """Puts numbers until it is told to stop."""

    def __init__(self) -> None:
        self._producer = RowProducer(self.ctx, self.ctx.ref("queue", RowQueue))
        self._next, self._is_over = 0, False

    def step(self) -> float | None:
        if self._is_over:
            return None
        self._producer.put({"number": np.arange(self._next, self._next + PUT_ROWS)})
        self._next += PUT_ROWS
        return 0.002

    @endpoint(timeout_s=120.0)
    def stop(self) -> int:
        """Return how many rows were put."""
        self._is_over = True
        return self._next


class Consumer(Actor):
    """Writes down when it got which rows, works on them for a moment, and what became of it."""

    def __init__(self, folder: str) -> None:
        queue = self.ctx.ref("queue", RowQueue)
        self._consumer = RowConsumer(self.ctx, queue, "train", max_rows=GET_ROWS)
        self._log = (Path(folder) / f"{self.ctx.name.replace('/', '-')}.log").open("a", buffering=1)

    def step(self) -> float | None:
        batch = self._consumer.get(1.0)
        if batch is not None:
            rows = " ".join(map(str, batch.packed("number").tolist()))
            self._log.write(f"\ngot {time.monotonic()} {rows} {os.getpid()}\n")
            time.sleep(random.uniform(0, 0.01))
            self._consumer.ack(batch)
            if self._consumer.flush() == [Put.ACCEPTED]:
                self._log.write(f"acked {time.monotonic()} {rows} {os.getpid()}\n")
        return 0.0


def main() -> None:
    """Kill, count, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        figures = killed(Path(folder), args.kills, random.Random(args.seed))
    write("row-kills", {"kills": args.kills, "seed": args.seed, **figures})


def killed(folder: Path, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kill so often; return what came of it."""
    children = (
        ChildSpec(id="queue", actor=RowQueue, args={"spec": SPEC}),
        ChildSpec(id="producer", actor=Producer),
        ChildSpec(id="consumer", actor=Consumer, args={"folder": str(folder)}, replicas=CONSUMERS),
    )
    root = SupervisorSpec(
        id="root",
        children=children,
        backoff=Backoff(base_s=0.001, cap_s=0.01),
        intensity=Intensity(restarts=10 * kills),
    )
    with Supervisor(
        root, run_dir=folder / "run", zygotes={"default": ("numpy", "relax_actor.row_queue")}
    ) as tree:
        dead: set[int] = set()
        moments = [_kill(tree, folder, number, rng, dead) for number in range(kills)]
        put = tree.ref("producer", Producer).ask(Producer.stop).result()
        progress = _drained(tree, put)
    log = _events(folder)
    got = Counter(row for event in log if event.what == "got" for row in event.rows)
    acked = Counter(row for event in log if event.what == "acked" for row in event.rows)
    delays = [delay for name, at in moments if name != "queue" for delay in _redelivered(log, name, at)]
    return {
        "rows": put,
        "lost": put - progress["acked"],
        "rows_nobody_got": put - len(got),
        "doubled_acknowledgements": sum(count > 1 for count in acked.values()),
        "got_more_than_once": sum(count > 1 for count in got.values()),
        "kills_with_rows_in_hand": len(delays),
        "redelivery_ms": spread(delays) | {"p90": round(statistics.quantiles(delays, n=10)[-1], 3)},
        "queue_away_ms": spread([took for name, took in moments if name == "queue"]),
    }


def _kill(
    tree: Supervisor, folder: Path, number: int, rng: random.Random, dead: set[int]
) -> tuple[str, float]:
    """Kill somebody who works; return who and when, or of the queue how long it was away, in ms."""
    name = "queue" if number % 10 == 9 else f"consumer/{rng.randrange(CONSUMERS)}"
    log = folder / f"{name.replace('/', '-')}.log"
    pid = _pid(tree, name, dead)
    while name != "queue" and f" {pid}\n".encode() not in log.read_bytes()[-4096:]:
        time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.03))
    moment = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    if name == "queue":
        tree.ref("queue", RowQueue).within(60.0).ask(RowQueue.progress, "train").result()
        return name, (time.monotonic() - moment) * 1e3
    return log.stem, moment


def _pid(tree: Supervisor, name: str, dead: set[int]) -> int:
    """Return who runs, once that is nobody who was killed."""
    while (pid := tree.pid(name)) is None or pid in dead:
        time.sleep(0.001)
    dead.add(pid)
    return pid


def _drained(tree: Supervisor, put: int) -> dict[str, int]:
    queue, deadline = tree.ref("queue", RowQueue).within(30.0), time.monotonic() + 60.0
    while (progress := queue.ask(RowQueue.progress, "train").result())["acked"] < put:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return progress


class Event(NamedTuple):
    """What a consumer wrote down."""

    at: float  # on the host's monotonic clock
    name: str
    what: str
    rows: tuple[int, ...]


def _events(folder: Path) -> list[Event]:
    """Return what the consumers wrote, by time; a torn line is none."""
    found: list[Event] = []
    for path in folder.glob("consumer-*.log"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] in {"got", "acked"} and len(words) == GET_ROWS + 3:
                found.append(Event(float(words[1]), path.stem, words[0], tuple(map(int, words[2:-1]))))
    return sorted(found)


def _redelivered(log: list[Event], name: str, moment: float) -> Iterator[float]:
    """Yield how long it took until somebody had what a dead consumer had in its hands, in ms."""
    last = next((event for event in reversed(log) if event.name == name and event.at < moment), None)
    if last is not None and last.what == "got":
        for event in log:
            if event.at > moment and event.what == "got" and not {*last.rows}.isdisjoint(event.rows):
                yield (event.at - moment) * 1e3
                return


if __name__ == "__main__":
    main()
