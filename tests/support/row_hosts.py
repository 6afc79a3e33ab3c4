"""Producers and consumers that run anywhere, and a queue with a dock beside it."""

from pathlib import Path

import numpy as np
from loop_hosts import TERMS, LoopHosts
from row_actors import Reader, tokens

from relax_actor import Actor, ChildSpec, RestartType, Supervisor, SupervisorSpec, endpoint
from relax_actor.roles.dock import RowDock
from relax_actor.row_queue import (
    Batch,
    ConsumerGroup,
    QueueSpec,
    RowConsumer,
    RowProducer,
    RowQueue,
    WholeGroups,
)

IMAGE = 3 << 20
"""Bytes of a group's image: more than a message between hosts has room for, with two of them."""

GROUP_ROWS = 3
SPEC = QueueSpec(
    fields=("number", "tokens", "image"),
    shared=("image",),
    groups=(
        ConsumerGroup(
            name="train", needs=("number", "tokens", "image"), sampler=WholeGroups(), max_attempts=9
        ),
    ),
)


def image(key: int, nbytes: int = IMAGE) -> np.ndarray:
    return np.full(nbytes, key % 251, np.uint8)


class Painter(Actor):
    """Puts groups of rows with an image each, and goes on where its dead incarnation was."""

    def __init__(self, groups: int) -> None:
        self.rows = groups * GROUP_ROWS
        self.queue = self.ctx.ref("queue", RowQueue)
        self.producer = RowProducer(self.ctx, self.queue)
        self.next = self.producer.rows_put()

    def step(self) -> float | None:
        if self.next >= self.rows:
            self.producer.close()
            self.queue.ask(RowQueue.end_stream).result()
            self.ctx.finish()
            return None
        key, numbers = self.next // GROUP_ROWS, range(self.next, self.next + GROUP_ROWS)
        self.producer.put_async(
            {"number": np.array(numbers), "tokens": [tokens(number) for number in numbers]},
            [key] * GROUP_ROWS,
            GROUP_ROWS,
            {"image": {key: image(key)}},
        )
        self.next += GROUP_ROWS
        return 0.0


class Looker(Reader):
    """Looks at whole groups and writes down what it has seen."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)
        self.consumer = RowConsumer(self.ctx, self.ctx.ref("queue", RowQueue), "train", max_rows=6)

    def read(self, batch: Batch) -> None:
        numbers = batch.packed("number").tolist()
        assert batch.keys == [number // GROUP_ROWS for number in numbers]
        for number, values, picture in zip(numbers, batch.views("tokens"), batch.views("image"), strict=True):
            assert values.tolist() == tokens(number).tolist()
            assert picture.shape == (IMAGE,)
            assert picture[0] == picture[-1] == number // GROUP_ROWS % 251
        with self.log.open("a") as log:
            log.write("".join(f"{number}\n" for number in numbers))
        self.consumer.ack(batch)


class Both(Actor):
    """Puts and gets within one asynchronous endpoint, while its mailbox stays open."""

    @endpoint
    async def pass_on(self, rows: int) -> list[int]:
        queue = self.ctx.ref("queue", RowQueue)
        producer, consumer = RowProducer(self.ctx, queue), RowConsumer(self.ctx, queue, "score", max_rows=4)
        first = await producer.aput({"tokens": [tokens(number) for number in range(rows)]})
        late = producer.put_async({"tokens": [tokens(rows)]})
        seen = []
        while len(seen) <= rows:
            batch = await consumer.aget(10.0)
            await producer.aappend(
                batch.rows, {"reward": np.array([len(each) for each in batch.views("tokens")])}
            )
            consumer.ack(batch)
            await consumer.aflush()
            seen += batch.rows
        assert list(await late) == [first.stop]
        return seen

    @endpoint
    def ping(self) -> str:
        return "here"


def children(log: Path, groups: int, *, painter: str, looker: str, dock: str = "dock", env=None):
    """Return a tree's children: the queue on the first host, the ends where they are wanted."""
    once = {"restart": RestartType.TRANSIENT, "env": env or {}}
    return (
        ChildSpec(id="queue", actor=RowQueue, args={"spec": SPEC, "dock": dock}, hosts=("a",), env=env or {}),
        ChildSpec(id="dock", actor=RowDock, hosts=("a",), env=env or {}),
        ChildSpec(id="painter", actor=Painter, args={"groups": groups}, hosts=(painter,), **once),
        ChildSpec(id="looker", actor=Looker, args={"log": str(log)}, hosts=(looker,), **once),
    )


def tree_over(hosts: LoopHosts, run_dir: Path, *children: ChildSpec, **fields) -> Supervisor:
    """Return a tree over hosts; `fields` are of its spec."""
    return Supervisor(
        SupervisorSpec(id="root", children=children, **fields),
        run_dir=run_dir,
        zygotes={"default": ("numpy",)},
        hosts=hosts.hosts,
        address=hosts.hosts[0].address,
        lease=TERMS,
    )
