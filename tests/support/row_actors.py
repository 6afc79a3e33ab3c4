"""A producer and consumers of a row queue that go on where their dead incarnations were."""

from pathlib import Path

import numpy as np

from relax_actor import Actor
from relax_actor.row_queue import Batch, RowConsumer, RowProducer, RowQueue

PUT_ROWS = 6
TRAINER_ROWS = 6


def tokens(number: int) -> np.ndarray:
    return np.arange(number, number + 3 + number % 5, dtype=np.int32)


class Maker(Actor):
    """Puts rows 0 to `total`, groups of three; ends the stream."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.queue = self.ctx.ref("queue", RowQueue)
        self.producer = RowProducer(self.ctx, self.queue)
        self.next = self.producer.rows_put()

    def step(self) -> float | None:
        if self.next >= self.total:
            self.producer.flush()
            self.queue.ask(RowQueue.end_stream).result()
            self.ctx.finish()
            return None
        numbers = range(self.next, min(self.total, self.next + PUT_ROWS))
        fields = {"tokens": [tokens(number) for number in numbers], "number": np.array(numbers)}
        self.producer.put_async(fields, [number // 3 for number in numbers], 3)
        self.next += len(numbers)
        return 0.0


class Reader(Actor):
    """Reads batches to the end of the stream."""

    consumer: RowConsumer

    def step(self) -> float | None:
        batch = self.consumer.get(5.0)
        if batch is not None:
            self.read(batch)
            return 0.0
        if self.consumer.is_finished:
            self.ctx.finish()
        return 0.01

    def read(self, batch: Batch) -> None:
        raise NotImplementedError


class Scorer(Reader):
    """Adds a reward to every row."""

    def __init__(self) -> None:
        queue = self.ctx.ref("queue", RowQueue)
        self.consumer = RowConsumer(self.ctx, queue, "score", max_rows=4)
        self.producer = RowProducer(self.ctx, queue)

    def read(self, batch: Batch) -> None:
        rewards = np.array([float(values.sum()) for values in batch.views("tokens")])
        self.producer.append(batch.rows, {"reward": rewards})
        self.consumer.ack(batch)
        self.consumer.flush()


class Trainer(Reader):
    """Looks at whole groups and writes down what it has seen."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)
        self.consumer = RowConsumer(self.ctx, self.ctx.ref("queue", RowQueue), "train", max_rows=TRAINER_ROWS)

    def read(self, batch: Batch) -> None:
        numbers = [int(each[0]) for each in batch.views("number")]
        for number, values, reward in zip(numbers, batch.views("tokens"), batch.views("reward"), strict=True):
            assert values.tolist() == tokens(number).tolist()
            assert reward[0] == values.sum()
        with self.log.open("a") as log:
            log.write("".join(f"{number}\n" for number in numbers))
        self.consumer.ack(batch)
