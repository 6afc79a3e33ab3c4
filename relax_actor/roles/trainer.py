"""The trainer: leases a batch, trains on it, publishes the new policy version, acknowledges, goes on.

`_life` is the whole loop on one screen. It yields between micro-batches and while it waits for the queue,
so that the actor can be asked and stopped at any time. It never waits for a rollout, a reward or a reader
of its weights.
"""

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from relax_actor.actor import Actor, Reply, endpoint
from relax_actor.config import Config
from relax_actor.dcs.receiver import PolicyReceiver
from relax_actor.devices import CPU, host_gpus, trainer_device
from relax_actor.errors import RemoteError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from relax_actor.protocol import BatchLease, BatchTrained, Opened
from relax_actor.rl.advantage import group_advantages, has_signal
from relax_actor.rl.batching import plan_updates
from relax_actor.rl.staleness import histogram
from relax_actor.roles import verdict
from relax_actor.roles.publishing import make_publishing
from relax_actor.roles.queue import HopelessRunError, TransferQueue
from relax_actor.roles.step_stats import Alarm, StepStats
from relax_actor.roles.trainer_past import TrainerPast
from relax_actor.trainers.base import TrainerBackend, TrainSequence
from relax_actor.transfer_queue.memory import spill_space
from relax_actor.transfer_queue.storage import RowReader
from transport.shm import ShmSpace

T = TypeVar("T")
Waiting = Generator[Reply[Any] | None, None, T]
"""A part of `_life`: yields what it waits for, returns its result."""

PARK_S = 20.0


class Trainer(Actor):
    """The one rank that trains the policy.

    Args:
        config: the run's.
        resume: a checkpoint folder to start from; empty starts from the model. A restarted incarnation
            starts from the newest checkpoint that this run has saved, if there is one.
    """

    def __init__(self, config: Config, resume: str = "") -> None:
        self._config = config
        device = trainer_device(config.train.device, host_gpus())
        self._backend = make_backend(config, device)
        rows = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        self._reader = RowReader(rows, spill_space(self.ctx.run_id, self.ctx.run_dir))
        self._queue = self.ctx.ref("queue", TransferQueue)
        self._past = TrainerPast(self.ctx, self._backend, keep=config.train.keep_checkpoints)
        start = self._past.load(resume)
        self._step, self._trained = start.step, start.trained
        space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        self._publishing = make_publishing(self.ctx, space, config.dcs, device)
        self._version = self._past.next_version(PolicyReceiver(space).latest())
        self._saved_step = self._step
        self._is_between_steps = True
        self._has_batch = self._is_preempted = False
        self._alarm = Alarm(config.train.mismatch_alarm)
        self._running = self._life()
        self._waiting_for: deque[Reply[Any]] = deque()

    def step(self) -> float | None:
        """Go on with `_life` unless it waits for an answer."""
        while self._waiting_for and self._waiting_for[0].done():
            self._waiting_for.popleft()
        if self._waiting_for:
            return None
        try:
            reply = next(self._running)
        except StopIteration:
            self.ctx.finish()
            return None
        except HopelessRunError as error:  # a restart would find the same: the run is over
            self.ctx.events.emit("run_hopeless", reason=str(error))
            verdict.leave(self.ctx.run_dir, str(error))
            self.ctx.finish()
            return None
        if reply is not None:
            self._waiting_for.append(reply)
        return 0.0

    @endpoint(idempotent=True)
    def preempt(self) -> bool:
        """Head to trainer: end after the step at hand, with a checkpoint; False after the last one."""
        if self._step >= self._config.run.steps:
            return False
        self._is_preempted = True
        self.ctx.events.emit("preempted", step=self._step)
        if not self._has_batch:  # it waits for one, which may take long
            self.ctx.finish()
        return True

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """Keep what was trained since the last checkpoint, unless a step is half done; publish no more."""
        if self._is_between_steps and self._step > self._saved_step:
            self._checkpoint()
        self._publishing.close()

    # -- the loop -------------------------------------------------------------------------------

    def _life(self) -> Waiting[None]:
        self._publish()
        yield from self._call(
            TransferQueue.open,
            Opened(step=self._step, policy_version=self._version, trained=self._trained),
        )
        while self._step < self._config.run.steps:
            batch, waited_s = yield from self._lease()
            self._has_batch = True
            if batch is None:
                break  # the dataset's prompts were dropped to the last: nothing left to train on
            stats = StepStats(waited_s=waited_s)
            if batch.samples:
                yield from self._train(batch, stats)
                self._version = PolicyVersion(self._version + 1)
            self._step += 1
            if batch.samples:
                with self.ctx.events.span("publish", version=self._version):
                    self._publish()
            yield from self._acknowledge(batch)
            self._say_step(batch, stats)
            if self._is_checkpoint_due():
                self._checkpoint()
            if self._is_preempted:
                return  # `on_stop` keeps what was trained
            self._has_batch = False
        self._publishing.flush()
        yield from self._until_finished()
        self._checkpoint()

    def _lease(self) -> Waiting[tuple[BatchLease | None, float]]:
        started = time.monotonic()
        with self.ctx.events.span("wait", step=self._step):
            while True:
                reply = self._queue.within(PARK_S * 2).ask(
                    TransferQueue.lease_batch, self.ctx.holder, self._version, PARK_S
                )
                yield reply
                batch = _answer(reply)
                if batch is not None:
                    point("batch_leased")
                    return batch, time.monotonic() - started
                if (yield from self._is_over()):
                    return None, 0.0

    def _train(self, batch: BatchLease, stats: StepStats) -> Waiting[None]:
        config = self._config.train
        sequences = self._sequences(batch)
        with self.ctx.events.span("train", step=self._step, samples=len(sequences)):
            if config.updates_per_batch > 1 and config.ratio_base == "trainer":
                for sequence, old in zip(sequences, self._backend.logprobs(sequences), strict=True):
                    sequence.old_logprobs = old
            updates = plan_updates(
                sequences, updates=config.updates_per_batch, micro_batch_size=config.micro_batch_size
            )
            for microbatches in updates:
                members = [sequence for microbatch in microbatches for sequence in microbatch]
                self._backend.begin_update(
                    total_tokens=sum(len(each.response) for each in members), total_sequences=len(members)
                )
                for microbatch in microbatches:
                    stats.add(self._backend.accumulate(microbatch))
                    yield None
                self._is_between_steps = False
                self._publishing.before_update()
                stats.updated(self._backend.finish_update())
        point("trained")

    def _acknowledge(self, batch: BatchLease) -> Waiting[None]:
        trained = BatchTrained(lease_id=batch.lease_id, step=self._step, policy_version=self._version)
        self._trained = yield from self._call(TransferQueue.ack_batch, self.ctx.holder, trained)
        self._is_between_steps = True
        point("acknowledged")

    def _until_finished(self) -> Waiting[None]:
        while not (yield from self._call(TransferQueue.await_finished, PARK_S)):
            pass

    def _is_over(self) -> Waiting[bool]:
        return bool((yield from self._call(TransferQueue.await_finished, 0.0)))

    def _call(self, method: Callable[..., Any], *args: Any) -> Waiting[Any]:
        """Ask the queue until it answers: its death costs a repetition, which it recognises.

        Raises:
            RemoteError: it refuses, such as a batch whose lease has ended; only a checkpoint helps then.
        """
        while True:
            reply = self._queue.within(PARK_S * 2).ask(method, *args)
            yield reply
            _raise_refusal(reply)
            if reply.exception() is None:
                return reply.result()
            self.ctx.events.emit("call_repeated", method=method.__name__, reason=str(reply.exception()))

    # -- batch, weights, checkpoint -------------------------------------------------------------

    def _sequences(self, batch: BatchLease) -> list[TrainSequence]:
        rewards: dict[int, list[float]] = {}
        for sample in batch.samples:
            rewards.setdefault(sample.group_id, []).append(sample.reward)
        advantages = group_advantages(rewards, self._config.train.advantage_estimator)
        dealt = {group: iter(values) for group, values in advantages.items()}
        return [
            TrainSequence(
                prompt=self._reader.read(sample.prompt),
                response=self._reader.read(sample.tokens),
                rollout_logprobs=self._reader.read(sample.logprobs),
                advantage=next(dealt[sample.group_id]),
                has_signal=has_signal(rewards[sample.group_id]),
                media={name: self._reader.read(ref) for name, ref in sample.media.items()} or None,
                key=(sample.group_id, sample.sample_index),
                versions=self._reader.read(sample.versions),
                routed_experts=self._reader.read(sample.routed_experts) if sample.routed_experts else None,
            )
            for sample in batch.samples
        ]

    def _publish(self) -> None:
        self._past.note_version(self._version)  # first, so that none is published twice
        self._publishing.publish(self._version, self._step, self._backend.weights())

    def _is_checkpoint_due(self) -> bool:
        every = self._config.train.checkpoint_every
        return bool(every) and self._step % every == 0 and self._step < self._config.run.steps

    def _checkpoint(self) -> None:
        self._past.save(self._step, self._version, self._trained)
        self._saved_step = self._step

    def _say_step(self, batch: BatchLease, stats: StepStats) -> None:
        if self._alarm.rings(stats.mismatch_abs, time.monotonic()):
            self.ctx.events.emit("logprob_mismatch", step=self._step, **stats.mismatch_fields())
        rewards = [sample.reward for sample in batch.samples]
        ages = histogram(batch.policy_version, [sample.oldest_version for sample in batch.samples])
        self.ctx.events.emit(
            "step",
            step=self._step,
            policy_version=self._version,
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            samples=len(rewards),
            groups=sorted({sample.group_id for sample in batch.samples}),
            response_tokens=sum(sample.tokens.shape[0] for sample in batch.samples),
            staleness={str(age): count for age, count in ages.items()},
            groups_filtered=batch.sampling.filtered,
            groups_refilled=batch.sampling.refilled,
            groups_carried=batch.sampling.carried,
            **stats.fields(skipped=batch.sampling.skipped),
        )


def _answer(reply: Reply[T]) -> T | None:
    """Return the queue's answer, or None while it is away.

    Raises:
        RemoteError: it refuses.
    """
    _raise_refusal(reply)
    return reply.result() if reply.exception() is None else None


def _raise_refusal(reply: Reply[Any]) -> None:
    error = reply.exception()
    if isinstance(error, RemoteError):
        raise error


def make_backend(config: Config, device: str = CPU) -> TrainerBackend:
    """Make the training backend that the configuration names, on torch's `device`."""
    import torch  # noqa: PLC0415 - once, in the trainer

    from relax_actor.trainers.torch_backend import TorchBackend  # noqa: PLC0415

    if device != CPU:
        torch.cuda.set_device(device)
    return TorchBackend(
        config.model,
        config.train,
        temperature=config.rollout.temperature,
        total_steps=config.run.steps,
        device=device,
    )
