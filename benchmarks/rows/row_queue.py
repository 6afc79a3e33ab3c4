"""Our row queue: any fields, leases, acknowledgements and a journal, as `relax_actor.row_queue` has it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_actor import (
    Actor,
    ChildSpec,
    Intensity,
    RestartType,
    Supervisor,
    SupervisorSpec,
    __version__,
    endpoint,
)
from relax_actor.row_queue import Batch, ConsumerGroup, QueueSpec, RowConsumer, RowProducer, RowQueue
from rows import work
from rows.engine import Consumer, Engine, Producer, await_done
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


class ProducerActor(Actor):
    """A producer's process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @endpoint(timeout_s=300.0)
    def run(self) -> None:
        end = _OurProducer(self)
        work.produce(self._plan, self.ctx.replica, end.put, end.parts)
        await_done(self._plan)


class ConsumerActor(Actor):
    """The consumer's process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @endpoint(timeout_s=300.0)
    def run(self) -> None:
        end = _OurConsumer(self)
        work.consume(self._plan, end.get, end.after, end.parts)


class Ours(Engine):
    """A supervisor with a row queue, and the benchmark's producers and consumer."""

    version = __version__

    def start(self, plan: Plan) -> Any:
        ends = (
            ChildSpec(
                id="producer",
                actor=ProducerActor,
                args={"plan": plan},
                replicas=plan.producers,
                restart=RestartType.TEMPORARY,
            ),
            ChildSpec(id="consumer", actor=ConsumerActor, args={"plan": plan}, restart=RestartType.TEMPORARY),
        )
        queue = ChildSpec(id="queue", actor=RowQueue, args={"spec": spec(plan)})
        tree = SupervisorSpec(id="bench", intensity=Intensity(restarts=0), children=(queue, *ends))
        folder = Path(plan.folder) / "run"
        folder.mkdir()
        self._tree = Supervisor(tree, run_dir=folder, zygotes={"default": ("numpy",)}).__enter__()

    def stop(self) -> None:
        self._tree.close()

    def launch(self, plan: Plan, shared: Any) -> Callable[[], bool]:  # noqa: ARG002 - the interface
        producers = ["producer"] if plan.producers == 1 else [f"producer/{n}" for n in range(plan.producers)]
        self._runs = [
            self._tree.ref("consumer", ConsumerActor).ask(ConsumerActor.run),
            *(self._tree.ref(name, ProducerActor).ask(ProducerActor.run) for name in producers),
        ]
        return lambda: all(not run.done() or run.exception() is None for run in self._runs)

    def join(self) -> None:
        for run in self._runs:
            run.result()

    def producer(self, shared: Any, plan: Plan, index: int) -> Producer:
        raise NotImplementedError("producers are actors")

    def consumer(self, shared: Any, plan: Plan) -> Consumer:
        raise NotImplementedError("the consumer is an actor")


def engine() -> Engine:
    """Return the engine."""
    return Ours()
