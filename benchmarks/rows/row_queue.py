"""Our row queue: any fields, leases, acknowledgements and a journal, as `relax_actor.row_queue` has it."""

import time
from typing import Any, ClassVar

from relax_actor import Actor, ChildSpec
from relax_actor.row_queue import Batch, ConsumerGroup, QueueSpec, RowConsumer, RowProducer, RowQueue
from rows import work
from rows.engine import Consumer, Engine, Producer, await_done
from rows.supervised import End, SupervisedEngine
from rows.work import FIELDS, GET_ROWS, Plan, Row


def spec(plan: Plan) -> QueueSpec:
    fields = (*FIELDS, "reward", *(("image",) if plan.media else ()))
    needs = (*work.READ, *(("image",) if plan.media else ()))
    return QueueSpec(fields=fields, groups=(ConsumerGroup(name="train", needs=needs),))


class _OurProducer(Producer):
    def __init__(self, actor: Actor) -> None:
        self._producer = RowProducer(actor.ctx, actor.ctx.ref("queue", RowQueue))

    def put(self, rows: list[Row], first: int) -> None:  # noqa: ARG002 - the interface
        fields = {name: [row[name] for row in rows] for name in rows[0] if name != "reward"}
        fields["reward"] = work.np.array([row["reward"] for row in rows])
        self._producer.put(fields)


class _OurConsumer(Consumer):
    def __init__(self, actor: Actor) -> None:
        queue = actor.ctx.ref("queue", RowQueue)
        self._consumer = RowConsumer(actor.ctx, queue, "train", max_rows=GET_ROWS, lease_rows=4 * GET_ROWS)
        self._stage: dict[str, Any] = {}
        self._batch: Batch | None = None

    def get(self) -> tuple[Row, float | None]:
        since = time.perf_counter()
        batch = self._batch = self._consumer.get()
        names = [*work.READ, *(["image"] if "image" in batch.fields else [])]
        packed = {name: work.copied(name, batch.packed(name), self._stage) for name in names}
        packed["ends"] = work.np.cumsum(batch.lengths("tokens"))
        return packed, None if batch.was_waited_for else time.perf_counter() - since

    def after(self) -> None:
        self._consumer.ack(self._batch)


class ProducerActor(End):
    """A producer's process."""

    def follow(self, plan: Plan) -> None:
        end = _OurProducer(self)
        work.produce(plan, self.ctx.replica, end.put, end.parts)
        await_done(plan)


class ConsumerActor(End):
    """The consumer's process."""

    def follow(self, plan: Plan) -> None:
        end = _OurConsumer(self)
        work.consume(plan, end.get, end.after, end.parts)


class Ours(SupervisedEngine):
    """A supervisor with a row queue, and the benchmark's producers and consumer."""

    ends: ClassVar = {"producer": ProducerActor, "consumer": ConsumerActor}

    def queue(self, plan: Plan) -> ChildSpec:
        return ChildSpec(id="queue", actor=RowQueue, args={"spec": spec(plan)})


def engine() -> Engine:
    """Return the engine."""
    return Ours()
