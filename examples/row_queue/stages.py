"""The row queue alone: three stages of processes share rows, one of them is killed, and no row is lost.

    python examples/row_queue/stages.py

`Reader` puts texts in groups of two, each group with a picture that both texts share. `Scorer` adds a field
to every row, and its first incarnation does not survive its third batch. `Trainer` gets whole groups that
have all fields, and acknowledges a group when its work is done.
"""

import os
import signal

import numpy as np

from relax_actor import Actor, ChildSpec, RestartType, Supervisor, SupervisorSpec, endpoint
from relax_actor.row_queue import ConsumerGroup, QueueSpec, RowConsumer, RowProducer, RowQueue, WholeGroups

GROUPS = 8
SPEC = QueueSpec(
    fields=("text", "picture", "score"),
    shared=("picture",),
    groups=(
        ConsumerGroup(name="score", needs=("text",)),
        ConsumerGroup(name="train", needs=("text", "picture", "score"), sampler=WholeGroups()),
    ),
)


def text(number: int) -> np.ndarray:
    """Return a text as its bytes: rows are numbers, of any length."""
    return np.frombuffer(f"text number {number}".encode(), np.uint8)


class Reader(Actor):
    """Puts all rows, then ends the stream; another incarnation goes on where this one was."""

    def __init__(self) -> None:
        self.queue = self.ctx.ref("queue", RowQueue)
        self.producer = RowProducer(self.ctx, self.queue)
        self.group = self.producer.rows_put() // 2

    def step(self) -> float | None:
        if self.group == GROUPS:
            self.producer.close()
            self.queue.ask(RowQueue.end_stream).result()
            self.ctx.finish()
            return None
        texts = [text(2 * self.group), text(2 * self.group + 1)]
        picture = {self.group: np.full((8, 8), self.group, np.float32)}
        self.producer.put_async({"text": texts}, [self.group] * 2, 2, {"picture": picture})
        self.group += 1
        return 0.0


class Scorer(Actor):
    """Gives every text a score: its length."""

    def __init__(self) -> None:
        queue = self.ctx.ref("queue", RowQueue)
        self.consumer = RowConsumer(self.ctx, queue, "score", max_rows=2)
        self.producer = RowProducer(self.ctx, queue)
        self.batches = 0

    def step(self) -> float | None:
        batch = self.consumer.get(1.0)
        if batch is None:
            return 0.0
        self.batches += 1
        if self.batches == 3 and self.ctx.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.producer.append(batch.rows, {"score": np.array(batch.lengths("text"), np.float32)})
        self.consumer.ack(batch)
        self.consumer.flush()
        return 0.0


class Trainer(Actor):
    """Gets whole groups in an asynchronous endpoint, until none will ever come."""

    @endpoint(timeout_s=60.0)
    async def train(self) -> list[str]:
        consumer = RowConsumer(self.ctx, self.ctx.ref("queue", RowQueue), "train", max_rows=4)
        lines = []
        while (batch := await consumer.aget()) is not None:
            texts = [bytes(view).decode() for view in batch.views("text")]
            pictures = [float(view.mean()) for view in batch.views("picture")]
            rows = zip(batch.keys, texts, pictures, batch.packed("score").tolist(), strict=True)
            lines += ["group {}: {}, picture {:g}, score {:g}".format(*row) for row in rows]
            consumer.ack(batch)
        await consumer.aflush()
        return lines


TREE = SupervisorSpec(
    id="stages",
    children=(
        ChildSpec(id="queue", actor=RowQueue, args={"spec": SPEC}),
        ChildSpec(id="scorer", actor=Scorer),
        ChildSpec(id="trainer", actor=Trainer),
        ChildSpec(id="reader", actor=Reader, restart=RestartType.TRANSIENT),
    ),
)

if __name__ == "__main__":  # actors import this file too
    with Supervisor(TREE, zygotes={"default": ("numpy",)}) as tree:
        for line in sorted(tree.ref("trainer", Trainer).ask(Trainer.train).result()):
            print(line)
        progress = tree.ref("queue", RowQueue).ask(RowQueue.progress, "train").result()
        print({name: count for name, count in progress.items() if count})
