"""Our queue, the actor and the ledger of a run: leases, journal, rewards, acknowledgements and all.

A producer is a rollout and a reward actor in one: it leases prompts, writes rows into shared memory, puts
them and puts their rewards. The consumer is a trainer whose batch is one group of eight samples. What a put
is timed for is writing and putting; all calls count in rows a second and in CPU. An image travels in the
place of the policy versions, which nobody reads here.
"""

import time
from typing import Any, ClassVar

import msgspec
import numpy as np

from relax_actor import Actor, ChildSpec
from relax_actor.config import Config
from relax_actor.ids import GroupId, Holder, PolicyVersion
from relax_actor.protocol import BatchTrained, FinishReason, Opened, PromptGroup, RewardReady, SampleReady
from relax_actor.roles.queue import TransferQueue
from relax_actor.transfer_queue.storage import RowReader, RowWriter
from rows import work
from rows.engine import Consumer, Engine, Producer, await_done
from rows.supervised import End, SupervisedEngine
from rows.work import GET_ROWS, PUT_ROWS, Plan, Row, pack
from transport.shm import ShmSpace

WAIT_S = 20.0
VERSION = PolicyVersion(1)


class Prompts(End):
    """Keeps the queue full of prompts."""

    def follow(self, plan: Plan) -> None:
        queue = self.ctx.ref("queue", TransferQueue).within(2 * WAIT_S)
        writer = RowWriter(ShmSpace(self.ctx.run_id), self.ctx.holder)
        queue.ask(TransferQueue.open, Opened(step=0, policy_version=VERSION)).result()
        submitted = 0
        while submitted < plan.rows // GET_ROWS:
            wanted = queue.ask(TransferQueue.await_room, WAIT_S).result().groups
            rows = writer.write([{"tokens": np.arange(256, dtype=np.int32)} for _ in wanted])
            groups = [_group(group_id, row["tokens"]) for group_id, row in zip(wanted, rows, strict=True)]
            queue.ask(TransferQueue.submit, groups).result()
            submitted += len(groups)


class _OurProducer(Producer):
    def __init__(self, actor: Actor) -> None:
        self._queue = actor.ctx.ref("queue", TransferQueue).within(2 * WAIT_S)
        self._writer = RowWriter(ShmSpace(actor.ctx.run_id), actor.ctx.holder)
        self._holder = actor.ctx.holder
        self._scorer = Holder(f"{actor.ctx.holder.name}/score", actor.ctx.holder.incarnation)
        self.parts = {"write_ms": [], "put_call_ms": [], "lease_and_score_ms": []}
        self._keys: list[tuple[int, int, int]] = []

    def lease(self) -> None:
        """Lease as many samples as one put has; a rollout does so while it generates."""
        since = time.perf_counter()
        while len(self._keys) < PUT_ROWS:
            leased = self._queue.ask(
                TransferQueue.lease_prompts,
                self._holder,
                VERSION,
                [key[0] for key in self._keys],
                PUT_ROWS - len(self._keys),
                WAIT_S,
            ).result()
            self._keys += [
                (lease.lease_id, lease.group.group_id, index)
                for lease in leased.prompts
                for index in lease.missing
            ]
        self.parts["lease_and_score_ms"].append((time.perf_counter() - since) * 1e3)

    def put(self, rows: list[Row], first: int) -> None:  # noqa: ARG002 - the interface
        since = time.perf_counter()
        refs = self._writer.write(
            [
                {"tokens": row["tokens"], "logprobs": row["logprobs"], "mask": row["mask"]}
                | ({"image": row["image"]} if "image" in row else {})
                for row in rows
            ]
        )
        written = time.perf_counter()
        samples = [_sample(key, ref) for key, ref in zip(self._keys, refs, strict=True)]
        self._queue.ask(TransferQueue.put_samples, self._holder, samples).result()
        self.parts["write_ms"].append((written - since) * 1e3)
        self.parts["put_call_ms"].append((time.perf_counter() - written) * 1e3)
        self._keys = []

    def score(self) -> None:
        """Put the rewards of as many samples."""
        since, left = time.perf_counter(), PUT_ROWS
        while left:
            tasks = self._queue.ask(TransferQueue.lease_rewards, self._scorer, [], left, WAIT_S).result()
            rewards = [
                RewardReady(
                    group_id=task.group_id, sample_index=task.sample_index, lease_id=task.lease_id, reward=1.0
                )
                for task in tasks
            ]
            self._queue.ask(TransferQueue.put_rewards, self._scorer, rewards).result()
            left -= len(tasks)
        self.parts["lease_and_score_ms"][-1] += (time.perf_counter() - since) * 1e3


class _OurConsumer(Consumer):
    def __init__(self, actor: Actor) -> None:
        self._queue = actor.ctx.ref("queue", TransferQueue).within(2 * WAIT_S)
        self._reader = RowReader(ShmSpace(actor.ctx.run_id))
        self._holder, self._stage, self._step = actor.ctx.holder, dict[str, Any](), 0
        self.parts = {"lease_call_ms": [], "read_ms": [], "pack_ms": [], "ack_ms": []}

    def get(self) -> tuple[Row, float | None]:
        since, waited = time.perf_counter(), False
        lease = self._queue.ask(TransferQueue.lease_batch, self._holder, VERSION, 0.0).result()
        while lease is None:
            waited = True
            lease = self._queue.ask(TransferQueue.lease_batch, self._holder, VERSION, WAIT_S).result()
        self._lease, leased = lease, time.perf_counter()
        rows = [
            {"tokens": self._reader.read(sample.tokens), "logprobs": self._reader.read(sample.logprobs)}
            | ({"image": self._reader.read(sample.versions)} if len(sample.versions.shape) > 1 else {})
            for sample in lease.samples
        ]
        read = time.perf_counter()
        packed = pack(rows, self._stage)
        done = time.perf_counter()
        times = (leased - since) * 1e3, (read - leased) * 1e3, (done - read) * 1e3
        if not waited:
            for name, took in zip(("lease_call_ms", "read_ms", "pack_ms"), times, strict=True):
                self.parts[name].append(took)
        return packed, None if waited else done - since

    def after(self) -> None:
        since = time.perf_counter()
        self._step += 1
        trained = BatchTrained(lease_id=self._lease.lease_id, step=self._step, policy_version=VERSION)
        self._queue.ask(TransferQueue.ack_batch, self._holder, trained).result()
        self.parts["ack_ms"].append((time.perf_counter() - since) * 1e3)


class ProducerActor(End):
    """A producer's process."""

    def follow(self, plan: Plan) -> None:
        end = _OurProducer(self)
        work.produce(plan, self.ctx.replica, end.put, end.parts, before=end.lease, after=end.score)
        await_done(plan)


class ConsumerActor(End):
    """The consumer's process."""

    def follow(self, plan: Plan) -> None:
        end = _OurConsumer(self)
        work.consume(plan, end.get, end.after, end.parts)


class Ours(SupervisedEngine):
    """A supervisor with the run's queue actor, and the benchmark's producers and consumer."""

    ends: ClassVar = {"prompts": Prompts, "producer": ProducerActor, "consumer": ConsumerActor}

    def queue(self, plan: Plan) -> ChildSpec:
        return ChildSpec(id="queue", actor=TransferQueue, args={"config": _config(plan)})


def _config(plan: Plan) -> Config:
    """Return the limits of a run whose step is one group of eight, with as large a window as the plan's."""
    config = msgspec.convert({"model": {"path": "none"}, "data": {"path": "none"}}, Config)
    groups = plan.rows // GET_ROWS
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, steps=groups, max_staleness=plan.window // GET_ROWS - 1),
        rollout=msgspec.structs.replace(config.rollout, samples_per_prompt=GET_ROWS),
        train=msgspec.structs.replace(config.train, global_batch_size=GET_ROWS),
    )


def _group(group_id: GroupId, tokens: Any) -> PromptGroup:
    return PromptGroup(group_id=group_id, tokens=tokens, samples=GET_ROWS, label="", origin="rows:1")


def _sample(key: tuple[int, int, int], ref: dict[str, Any]) -> SampleReady:
    lease_id, group_id, index = key
    return SampleReady(
        group_id=group_id,
        sample_index=index,
        lease_id=lease_id,
        tokens=ref["tokens"],
        logprobs=ref["logprobs"],
        versions=ref.get("image", ref["mask"]),
        oldest_version=VERSION,
        newest_version=VERSION,
        finish_reason=FinishReason.STOP,
    )


def engine() -> Engine:
    """Return the engine."""
    return Ours()
