"""The trainer: leases a batch, trains on it, publishes the new policy version, acknowledges, goes on.

`_life` is the whole loop on one screen. It yields between micro-batches and while it waits for the queue,
so that the actor can be asked and stopped at any time. It never waits for a rollout, a reward or a reader
of its weights.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

import msgspec

from relax_actor.actor import Actor, Reply, endpoint
from relax_actor.config import Config
from relax_actor.dcs.receiver import PolicyReceiver
from relax_actor.devices import CPU, host_gpus, trainer_device
from relax_actor.errors import RemoteError
from relax_actor.faults import point
from relax_actor.ids import LeaseId, PolicyVersion
from relax_actor.protocol import BatchLease, BatchTrained, Opened, TrainSample
from relax_actor.rl.advantage import group_advantages, has_signal
from relax_actor.rl.staleness import histogram
from relax_actor.roles import verdict
from relax_actor.roles.feed import PARK_S, Feed, Waiting, raise_refusal
from relax_actor.roles.publishing import make_publishing
from relax_actor.roles.queue import TransferQueue
from relax_actor.roles.queue_errors import HopelessRunError
from relax_actor.roles.step_stats import Alarm, StepStats
from relax_actor.roles.trainer_past import TrainerPast
from relax_actor.roles.training_turn import TrainingTurn
from relax_actor.roles.updates import make_updates
from relax_actor.trainers.base import TrainerBackend, TrainSequence
from relax_actor.transfer_queue.memory import spill_space
from relax_actor.transfer_queue.storage import RowReader
from transport.shm import ShmSpace

ANSWER_S = 5.0  # for the queue, when the trainer is to stop


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
        self._turn = TrainingTurn(config, self._backend, self.ctx)
        rows = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        self._reader = RowReader(rows, spill_space(self.ctx.run_id, self.ctx.run_dir))
        self._queue = self.ctx.ref("queue", TransferQueue)
        self._feed = Feed(self._queue, self.ctx, in_parts=config.train.stream_micro_batches)
        self._updates = make_updates(self._backend, config, self._before_update)
        self._past = TrainerPast(self.ctx, self._backend, keep=config.train.keep_checkpoints)
        start = self._past.load(resume)
        self._step, self._trained = start.step, start.trained
        space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        source = CPU if config.run.colocate else device  # a turn on a GPU ends before its readers come
        self._publishing = make_publishing(self.ctx, space, config.dcs, source)
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
        if self._waiting_for and not self._is_between_steps:
            self._hear_acknowledgement()
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
            stats = StepStats()
            batch = yield from self._train(stats)
            self._turn.offload(stats)
            if batch is None:
                break  # the dataset's prompts were dropped to the last: nothing left to train on
            if batch.samples:
                self._version = PolicyVersion(self._version + 1)
            self._step += 1
            if batch.samples:
                with self.ctx.events.span("publish", version=self._version):
                    self._publish()
            self._turn.end()
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

    def _train(self, stats: StepStats) -> Waiting[BatchLease | None]:
        """Train on the next batch, in as many parts as it comes in; None where no more comes."""
        samples: list[TrainSample] = []
        lease_id: LeaseId | None = None
        while True:
            part = yield from self._next_part(stats)
            self._has_batch = part is None or part.is_whole
            if part is None:
                return None
            if part.lease_id != lease_id:
                lease_id, samples = part.lease_id, []
                stats.restart()
                self._updates.restart()
            samples += part.samples
            if samples:
                yield from self._turn.begin(stats)
                sequences = self._sequences(part)
                with self.ctx.events.span("train", step=self._step, samples=len(sequences)):
                    yield from self._updates.train(sequences, stats, is_whole=part.is_whole)
            if part.is_whole:
                break
        if samples:
            point("trained")
        samples.sort(key=lambda sample: (sample.group_id, sample.sample_index))
        return msgspec.structs.replace(part, samples=tuple(samples))

    def _next_part(self, stats: StepStats) -> Waiting[BatchLease | None]:
        with self.ctx.events.span("wait", step=self._step):
            while True:
                part, waited_s = yield from self._feed.take(self._version)
                stats.waited(waited_s)
                if part is not None:
                    return part
                if not self._feed.has_some and (yield from self._is_over()):
                    return None

    def _before_update(self) -> None:
        self._is_between_steps = False
        self._publishing.before_update()

    def _acknowledge(self, batch: BatchLease) -> Waiting[None]:
        trained = BatchTrained(lease_id=batch.lease_id, step=self._step, policy_version=self._version)
        self._trained = yield from self._call(
            TransferQueue.ack_batch, self.ctx.holder, trained, then=self._ask_ahead
        )
        self._is_between_steps = True
        point("acknowledged")

    def _hear_acknowledgement(self) -> None:
        """Finish a step that only waits for the queue to count it; the queue stops after its trainer."""
        wait(self._waiting_for, timeout=ANSWER_S)
        with suppress(RemoteError):  # refused: what was trained counts for nothing
            self.step()

    def _ask_ahead(self) -> None:
        """Ask for the next batch at once: the queue gets this after the acknowledgement."""
        if self._step < self._config.run.steps:
            self._feed.ask(self._version)

    def _until_finished(self) -> Waiting[None]:
        while not (yield from self._call(TransferQueue.await_finished, PARK_S)):
            pass

    def _is_over(self) -> Waiting[bool]:
        return bool((yield from self._call(TransferQueue.await_finished, 0.0)))

    def _call(
        self, method: Callable[..., Any], *args: Any, then: Callable[[], None] = lambda: None
    ) -> Waiting[Any]:
        """Ask the queue until it answers: its death costs a repetition, which it recognises.

        Args:
            method: of the queue.
            args: for it.
            then: called once it was asked.

        Raises:
            RemoteError: it refuses, such as a batch whose lease has ended; only a checkpoint helps then.
        """
        while True:
            reply = self._queue.within(PARK_S * 2).ask(method, *args)
            then()
            yield reply
            raise_refusal(reply)
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
        starts_offloaded=config.run.colocate,
    )
