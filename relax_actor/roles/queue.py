"""The TransferQueue's actor: parks those who wait, adopts what is put, and keeps the ledger's word.

All decisions are the ledger's (`transfer_queue.ledger`); this file is its shell. Rows stay where their
producers wrote them, in shared memory (`transfer_queue.intake`), and the ledger says when nobody needs one.
"""

from collections.abc import Callable

import msgspec

from relax_actor.actor import endpoint
from relax_actor.config import Config
from relax_actor.faults import point
from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion
from relax_actor.protocol import (
    Accounting,
    BatchLease,
    BatchTrained,
    Leased,
    Opened,
    PromptGroup,
    RewardReady,
    RewardTask,
    SampleChunk,
    SampleReady,
    Wanted,
)
from relax_actor.roles.deciding import DecidingActor
from relax_actor.roles.evals import EvalRounds
from relax_actor.roles.leasing import Leasing
from relax_actor.roles.queue_errors import HopelessRunError, StaleBatchError
from relax_actor.roles.queue_news import QueueNews
from relax_actor.roles.relief import Relief
from relax_actor.transfer_queue.intake import Intake
from relax_actor.transfer_queue.journal import read
from relax_actor.transfer_queue.ledger import Ledger
from relax_actor.transfer_queue.limits import ledger_config
from relax_actor.transfer_queue.memory import Memory, spill_space
from relax_actor.transfer_queue.records import Put, TrainedSet
from transport.shm import ShmSpace

MANY = 4096
"""Callers that may be parked in one endpoint."""

TICK_S = 1.0


class TransferQueue(DecidingActor):
    """Leases prompts, samples and batches; sees that every sample is trained once or accounted for."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        journal = self.ctx.run_dir / f"queue-{self.ctx.run_id}.journal"
        past = list(read(journal))
        self._ledger = Ledger.replay(ledger_config(config), past)
        self._begin(self._ledger, journal)
        budget_bytes = int(config.queue.max_size_gb * 2**30)
        spill = spill_space(self.ctx.run_id, self.ctx.run_dir)
        self._memory = Memory(self._space, spill, budget_bytes, self._ledger.holdings())
        self._relief = Relief(self._memory, self._ledger, self.ctx.events)
        self._news = QueueNews(self.ctx.events, self._ledger)
        self._intake = Intake(self._space, self._ledger, self._memory)
        self._evals = EvalRounds(config, past)
        self._leasing = Leasing(self._ledger, self._now, self.ctx.wake)
        self._opened = self._ledger.version is not None
        self._fenced: dict[str, int] = {}
        self._ticked = 0.0

    # -- prompts --------------------------------------------------------------------------------

    @endpoint(concurrency=MANY)
    async def await_room(self, wait_s: float) -> Wanted:
        """Return the prompts wanted now; wait up to `wait_s` for some to be."""
        return await self._until(self._wanted, wait_s) or Wanted()

    @endpoint(idempotent=True)
    def submit(self, groups: list[PromptGroup]) -> None:
        """Take prompts, each once."""
        self._intake.prompts(groups, self._now())
        self._notify()

    @endpoint(idempotent=True)
    def submit_eval(self, eval_round: int, groups: list[PromptGroup]) -> None:
        """Take all prompts of one evaluation; it stays wanted where some could not be taken."""
        if self._intake.prompts(groups, self._now()):
            self._evals.submitted(eval_round, [group.group_id for group in groups])
        self._notify()

    @endpoint(idempotent=True)
    def reject(self, group_id: GroupId, reason: str) -> None:
        """Drop a prompt that can never be sampled; another takes its place."""
        self._ledger.reject(group_id, reason, self._now())
        self._notify()

    # -- rollouts -------------------------------------------------------------------------------

    @endpoint(concurrency=MANY)
    async def lease_prompts(
        self,
        holder: Holder,
        policy_version: PolicyVersion | None,
        held: list[LeaseId],
        max_samples: int,
        wait_s: float,
    ) -> Leased:
        """Lease its share of the prompts to a replica that has installed the newest policy version.

        Returns at once, without prompts, when a newer version than `policy_version` is published. Leases
        that are not among `held` were lost on their way and are taken back.
        """
        self._ledger.retain(holder, held, self._now())

        def look() -> Leased | None:
            newest = self._ledger.version if self._opened else None
            if newest is None or self._is_gone(holder) or self._relief.must_wait:
                return None
            return self._leasing.leased(asker, newest)

        with self._leasing.asking(holder, policy_version, max_samples) as asker:
            return await self._until(look, wait_s) or Leased()

    @endpoint(idempotent=True)
    def put_samples(self, holder: Holder, samples: list[SampleReady]) -> list[Put]:
        """Take finished samples; a duplicate or a late one is refused by name, never stored."""
        outcomes = self._intake.samples(samples, holder, self._now())
        self._leasing.put(holder, len(samples))
        self._notify()
        self._news.say_refused(holder, "samples", outcomes)
        return outcomes

    @endpoint(idempotent=True)
    def put_chunks(self, holder: Holder, chunks: list[SampleChunk]) -> list[Put]:
        """Take what there is of unfinished samples; the next lease carries it, if this one ends."""
        outcomes = self._intake.chunks(chunks, holder, self._now())
        self._notify()
        self._news.say_refused(holder, "chunks", outcomes)
        return outcomes

    # -- rewards --------------------------------------------------------------------------------

    @endpoint(concurrency=MANY)
    async def lease_rewards(
        self, holder: Holder, held: list[LeaseId], max_rows: int, wait_s: float
    ) -> list[RewardTask]:
        """Lease samples to score; as for prompts, what is not among `held` is taken back."""
        self._ledger.retain(holder, held, self._now())

        def look() -> list[RewardTask] | None:
            if self._is_gone(holder):
                return None
            return self._ledger.lease_rewards(holder, max_rows, self._now()) or None

        return await self._until(look, wait_s) or []

    @endpoint(idempotent=True)
    def put_rewards(self, holder: Holder, rewards: list[RewardReady]) -> list[Put]:
        """Take rewards, or why there are none."""
        outcomes = self._ledger.put_rewards(rewards, holder, self._now())
        self._notify()
        self._news.say_refused(holder, "rewards", outcomes)
        return outcomes

    # -- the trainer ----------------------------------------------------------------------------

    @endpoint(idempotent=True)
    def open(self, opened: Opened) -> None:
        """Go on from a trainer's starting point: nothing is dealt before this."""
        if self._ledger.version == opened.policy_version:
            return  # asked again: the first answer got lost
        trained = msgspec.json.decode(opened.trained, type=TrainedSet) if opened.trained else TrainedSet()
        self._ledger.rewind(trained, opened.policy_version, self._now())
        self._opened = True
        if opened.step == 0:
            self._evals.want(0)
        self._notify()

    @endpoint(concurrency=MANY)
    async def lease_batch(
        self, holder: Holder, policy_version: PolicyVersion, wait_s: float
    ) -> BatchLease | None:
        """Lease the next batch: whole groups, none older than the staleness bound allows.

        Raises:
            HopelessRunError: so many groups were dropped in a row that no batch will ever be complete.
        """
        return await self._dealt(
            holder, lambda: self._ledger.lease_batch(holder, policy_version, self._now()), wait_s
        )

    @endpoint(concurrency=MANY)
    async def lease_part(
        self,
        holder: Holder,
        policy_version: PolicyVersion,
        lease_id: LeaseId | None,
        have: int,
        wait_s: float,
    ) -> BatchLease | None:
        """Lease the next groups of a batch before all of it is there; see `Ledger.lease_part`.

        Raises:
            HopelessRunError: as `lease_batch`.
        """
        return await self._dealt(
            holder,
            lambda: self._ledger.lease_part(holder, policy_version, lease_id, have, self._now()),
            wait_s,
        )

    @endpoint(idempotent=True)
    def ack_batch(self, holder: Holder, trained: BatchTrained) -> str:
        """Mark a batch as trained; returns the JSON for a checkpoint after this step."""
        outcome = self._ledger.ack_batch(trained, holder, self._now())
        if outcome is Put.STALE:
            raise StaleBatchError(trained.lease_id, trained.step)
        self._evals.want_after(trained.step)
        self._news.say_accounting()
        self._notify()
        return msgspec.json.encode(self._ledger.trained_groups()).decode()

    @endpoint(concurrency=MANY)
    async def await_finished(self, wait_s: float) -> bool:
        """Return True once every group is trained or dropped and every evaluation has its result."""
        return bool(await self._until(lambda: self._is_finished() or None, wait_s))

    @endpoint
    def accounting(self) -> Accounting:
        """Return where all samples are; see invariant I2."""
        return self._ledger.accounting()

    # -- time and deaths ------------------------------------------------------------------------

    def step(self) -> float | None:
        """Take back what is overdue, free what nobody needs, say what happened."""
        now = self._now()
        for each in self._ledger.expire(now):
            self._news.say_expired(each)
        if self._leasing.is_time(now) or self._word.give():
            self._notify()
        if self._word.is_given:
            self._word.is_given = False
            point("queue_answered")
        self._say_what_happened()
        is_relieved = self._relief.relieve()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._news.say_accounting()
            self._news.say_what_is_awaited(now)
        if not is_relieved:
            return 0.0
        deadlines = (self._ledger.next_deadline(), self._leasing.look_again_s)
        return min([TICK_S, *(max(0.001, at - now) for at in deadlines if at is not None)])

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """Take back what a dead incarnation held, at once."""
        self._fenced[name] = max(incarnation, self._fenced.get(name, 0))
        self._ledger.holder_gone(name, incarnation, self._now())
        self._leasing.gone(name, incarnation)
        self._notify()

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """Leave nothing that only a living queue needs."""
        self._word.close()

    # -- inside ---------------------------------------------------------------------------------

    async def _dealt(
        self, holder: Holder, deal: Callable[[], BatchLease | None], wait_s: float
    ) -> BatchLease | None:
        def look() -> BatchLease | None:
            if self._is_gone(holder):
                return None
            if reason := self._ledger.hopeless():
                raise HopelessRunError(reason)
            return deal()

        self._news.trainer_waits_since = self._now()
        try:
            return await self._until(look, wait_s)
        finally:
            self._news.trainer_waits_since = None

    def _wanted(self) -> Wanted | None:
        if not self._opened:
            return None
        groups, rounds = self._ledger.upcoming(), self._evals.wanted
        return Wanted(groups=groups, eval_rounds=rounds) if groups or rounds else None

    def _say_what_happened(self) -> None:
        for segment in self._ledger.take_freed():
            self._memory.free(segment)
        self._news.say_dropped()
        for result in self._evals.finished(self._ledger):
            self.ctx.events.emit("eval", **result)

    def _is_finished(self) -> bool:
        return self._ledger.finished() and not self._evals.open

    def _is_gone(self, holder: Holder) -> bool:
        return holder.incarnation <= self._fenced.get(holder.name, 0)
