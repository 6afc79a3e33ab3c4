"""The reward actor: leases finished samples, has them scored in killable processes, puts the rewards.

User code never runs here: it may loop, leak or crash, and costs at most the sample it was given.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

from relax_actor.actor import Actor, Reply
from relax_actor.config import Config
from relax_actor.data.template import PromptEncoder
from relax_actor.faults import point
from relax_actor.homes import LoopHosts
from relax_actor.ids import LeaseId
from relax_actor.protocol import RewardReady, RewardTask
from relax_actor.rewards.pool import RewardOutcome, RewardPool
from relax_actor.rewards.registry import RewardInput
from relax_actor.roles.queue import TransferQueue
from relax_actor.roles.rows import Arrival, rows_of
from relax_actor.transfer_queue.records import Put
from transport.shm import SegmentMissingError

PARK_S = 20.0
TASKS_PER_WORKER = 16
"""Samples leased ahead, so that a worker never waits for a message."""


class Reward(Actor):
    """Scores samples with the configured function.

    Args:
        config: the run's.
        hosts: of the run.
    """

    def __init__(self, config: Config, hosts: LoopHosts = LoopHosts()) -> None:  # noqa: B008 - frozen
        reward = config.reward
        self._config = config
        self._encoder = PromptEncoder(Path(config.model.path), config.data)
        self._rows = rows_of(self.ctx, hosts)
        self._queue = self.ctx.ref("queue", TransferQueue)
        self._pool = RewardPool(
            reward.function,
            workers=reward.workers,
            timeout_s=reward.timeout_s,
            user_path=config.run.user_path,
        )
        self._capacity = reward.workers * TASKS_PER_WORKER
        self._scoring: list[tuple[Any, RewardTask]] = []
        self._asking: Reply[list[RewardTask]] | None = None
        self._arriving: tuple[list[RewardTask], Arrival] | None = None
        self._putting: list[tuple[Reply[list[Put]], list[RewardReady]]] = []
        self._failures_said: set[str] = set()

    def step(self) -> float | None:
        """Lease, score, put."""
        self._take_tasks()
        self._collect()
        self._settle_puts()
        return None  # a lease, a finished score and an answered put all wake this actor

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook\'s signature
        """End the pool's processes."""
        self._pool.close()

    def _take_tasks(self) -> None:
        if self._asking is not None and self._asking.done():
            reply, self._asking = self._asking, None
            if reply.exception() is None:  # else the queue is away: ask its next incarnation
                tasks = reply.result()
                self._arriving = tasks, self._rows.fetch([task.tokens for task in tasks])
        if self._arriving is not None and self._arriving[1].done():
            tasks, self._arriving = self._arriving[0], None
            for task in tasks:
                with contextlib.suppress(SegmentMissingError):  # its lease has ended, and so has the row
                    self._score(task)
        room = self._capacity - len(self._scoring)
        if self._asking is None and self._arriving is None and room > 0:
            self._asking = self._queue.within(PARK_S * 2).ask(
                TransferQueue.lease_rewards, self.ctx.holder, self._held(), room, PARK_S
            )

    def _held(self) -> list[LeaseId]:
        scoring = [task.lease_id for _, task in self._scoring]
        putting = [reward.lease_id for _, rewards in self._putting for reward in rewards]
        return list(dict.fromkeys(scoring + putting))

    def _score(self, task: RewardTask) -> None:
        point("rewarding")
        tokens = self._rows.read(task.tokens).tolist()
        future = self._pool.submit(
            RewardInput(
                response=self._encoder.decode(tokens),
                label=task.label,
                extra=task.extra,
                origin=task.origin,
                group_id=task.group_id,
                sample_index=task.sample_index,
                finish_reason=task.finish_reason.value,
            )
        )
        future.add_done_callback(lambda _done: self.ctx.wake())
        self._scoring.append((future, task))

    def _collect(self) -> None:
        done = [(future, task) for future, task in self._scoring if future.done()]
        if not done:
            return
        self._scoring = [(future, task) for future, task in self._scoring if not future.done()]
        self._send([self._settled(task, future.result()) for future, task in done])
        point("reward_sent")

    def _settled(self, task: RewardTask, outcome: RewardOutcome) -> RewardReady:
        self.ctx.events.emit(
            "span", name="reward", start=time.time() - outcome.seconds, dur_s=outcome.seconds
        )
        reward, reason = outcome.reward, outcome.reason
        if reward is None:
            self._say_failure(task, reason)
            if self._config.reward.on_error == "score":
                reward = self._config.reward.error_reward
        return RewardReady(
            group_id=task.group_id,
            sample_index=task.sample_index,
            lease_id=task.lease_id,
            reward=reward,
            reason=reason,
        )

    def _say_failure(self, task: RewardTask, reason: str) -> None:
        self.ctx.events.emit(
            "reward_failed",
            group_id=task.group_id,
            sample_index=task.sample_index,
            origin=task.origin,
            reason=reason.splitlines()[0] if reason else "",
        )
        kind = reason.splitlines()[-1] if reason else ""
        if kind not in self._failures_said:  # the whole traceback once per kind
            self._failures_said.add(kind)
            print(reason, flush=True)  # noqa: T201 - this actor's log

    def _send(self, rewards: list[RewardReady]) -> None:
        reply = self._queue.ask(TransferQueue.put_rewards, self.ctx.holder, rewards)
        self._putting.append((reply, rewards))

    def _settle_puts(self) -> None:
        waiting, self._putting = self._putting, []
        for reply, rewards in waiting:
            if not reply.done():
                self._putting.append((reply, rewards))
            elif reply.exception() is not None:
                self._send(rewards)
