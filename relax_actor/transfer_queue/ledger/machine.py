"""The ledger's methods, in the order the data flows round the loop."""

from collections.abc import Collection, Iterable
from typing import Self

from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion
from relax_actor.protocol import PromptGroup, Purpose, RewardTask
from relax_actor.transfer_queue.events import (
    EvalReported,
    Event,
    GroupDropped,
    Published,
    RewardLeased,
    Rewound,
    StreamEnded,
    Submitted,
)
from relax_actor.transfer_queue.ledger.fold import apply
from relax_actor.transfer_queue.ledger.groups import eval_result, reward_task
from relax_actor.transfer_queue.ledger.leases import Lease
from relax_actor.transfer_queue.ledger.lending import PromptLender
from relax_actor.transfer_queue.records import (
    DroppedGroup,
    DropReason,
    EvalResult,
    Expired,
    LeaseKind,
    Refusal,
    TrainedSet,
)
from relax_actor.transfer_queue.rules import LedgerConfig


class Ledger(PromptLender):
    """Who has which samples of which prompt, and what became of them.

    Args:
        config: the limits.

    `now` is always seconds of one clock that never goes back. No method waits or does I/O; after each, the
    events of `take_events` belong into the journal before anyone is told what was decided.
    """

    @classmethod
    def replay(cls, config: LedgerConfig, events: Iterable[Event]) -> Self:
        """Return the ledger that these events made; what it freed and dropped back then is not told again."""
        ledger = cls(config)
        for event in events:
            apply(ledger._state, event)
        ledger.take_freed()
        ledger.take_dropped()
        return ledger

    # Prompts

    def submit(self, group: PromptGroup, now: float) -> bool:
        """Take in a prompt, if there is room for it and it is the next one.

        Evaluation prompts have negative ids of their own choice; they need neither room nor order.

        Returns:
            Whether it is new here. False does no harm: the same prompt twice, or one out of turn, as happens
            when the trainer went back meanwhile: ask `room` and `next_group` again.

        Raises:
            ValueError: no samples are wanted, or the id is not of the kind its purpose has.
        """
        self._tick(now)
        if group.samples < 1 or (group.group_id < 0) != (group.purpose is Purpose.EVAL):
            raise ValueError(
                f"group {group.group_id} of {group.samples} samples cannot be for {group.purpose}"
            )
        refusal = self._why_not(group)
        if refusal is not None:
            self.refused[refusal] += 1
            return False
        self._emit(Submitted(group=group))
        return True

    def reject(self, group_id: GroupId, reason: str, now: float, *, origin: str = "") -> bool:
        """Drop a prompt that can never be sampled, be it in the queue or the next to come.

        Returns:
            Whether it was dropped; not if it is done with already or in the trainer's hands.
        """
        self._tick(now)
        group = self._state.groups.get(group_id)
        if group is not None and not group.complete:
            self._drop(group, DropReason.REJECTED, reason)
        elif group is None and group_id == self.next_group():
            self._reject_unseen(group_id, reason, origin)
        else:
            self.refused[Refusal.OUT_OF_TURN] += 1
            return False
        return True

    def end_stream(self, now: float) -> None:
        """Say that no further prompt will come; the last batch may then be smaller."""
        self._tick(now)
        if not self._state.stream_ended:
            self._emit(StreamEnded())

    # Reward actors

    def lease_rewards(self, holder: Holder, max_rows: int, now: float) -> list[RewardTask]:
        """Lend finished samples to a reward actor, lowest groups first; one lease for all of them."""
        rows = self._state.unscored.smallest(max_rows) if self._admits(holder, now) else []
        if not rows:
            return []
        lease_id = self._state.leases.next_id
        until_s = now + self.config.reward_lease_s
        self._emit(
            RewardLeased(lease_id=lease_id, holder=holder, rows=tuple(rows), since_s=now, until_s=until_s)
        )
        return [reward_task(self._state.groups[group_id], index, lease_id) for group_id, index in rows]

    # The trainer

    def published(self, version: PolicyVersion, now: float) -> bool:
        """Learn of the newest policy version; a lower one than known is refused and counted (I7)."""
        self._tick(now)
        if self._goes_back(version):
            return False
        if version != self._state.version:
            self._emit(Published(version=version))
            self._drop_stale()
        return True

    # Deaths, deadlines, checkpoints

    def holder_gone(self, name: str, incarnation: int, now: float) -> None:
        """Take back what this incarnation of an actor, and older ones, hold; refuse them from now on."""
        self._tick(now)
        self._fence(name, incarnation + 1)

    def retain(self, holder: Holder, lease_ids: Collection[LeaseId], now: float) -> None:
        """Take back the prompts and rewards a living holder does not know of: the answer got lost.

        To be called when a holder meets a restarted queue, with all the leases it has.
        """
        self._tick(now)
        leases = self._state.leases.of(holder.name)
        lost = [lease for lease in leases if lease.holder == holder and lease.lease_id not in lease_ids]
        self._end((lease for lease in lost if lease.kind is not LeaseKind.BATCH), failed=False)

    def expire(self, now: float) -> list[Expired]:
        """End the leases and drop the groups whose time is over; return the leases and who had them."""
        self._tick(now)
        leases = self._state.leases.due(now)
        expired = [_expired(lease) for lease in leases]
        self._end(leases)
        for group in self._state.overdue_groups(now):
            self._end_overdue(group, now)
        return expired

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do, in seconds of the queue's clock."""
        deadlines = (self._state.leases.next_deadline(), self._state.next_group_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def rewind(self, trained: TrainedSet, version: PolicyVersion, now: float) -> None:
        """Go on from a checkpoint: what it has not trained is sampled anew, from `version`.

        The same for a trainer that came back while the queue lived on, and for a whole run that starts with
        an empty queue. See `rewind.py`.

        Raises:
            ValueError: `version` is not higher than every version before (I7).
        """
        self._tick(now)
        known = self._state.version
        if known is not None and version <= known:
            raise ValueError(f"policy version {version} after version {known}: versions never go back")
        self._emit(Rewound(trained=trained, version=version))

    resume = rewind

    def eval_results(self, among: Collection[GroupId] | None = None) -> list[EvalResult]:
        """Return each finished evaluation prompt once; only those `among` these, if any are given."""
        finished = sorted(self.finished_evals if among is None else self.finished_evals & {*among})
        results = [
            eval_result(self._state.groups[group_id], self._state.finished_evals[group_id])
            for group_id in finished
        ]
        for group_id in finished:
            self._emit(EvalReported(group_id=group_id))
        return results

    def _why_not(self, group: PromptGroup) -> Refusal | None:
        is_train = group.purpose is Purpose.TRAIN
        if group.group_id in self._state.groups:
            return Refusal.DUPLICATE
        if is_train and self._state.positions.settled(group.group_id):
            return Refusal.DUPLICATE
        in_turn = self.room() > 0 and group.group_id == self.next_group()
        return Refusal.OUT_OF_TURN if is_train and not in_turn else None

    def _reject_unseen(self, group_id: GroupId, reason: str, origin: str) -> None:
        dropped = DroppedGroup(
            group_id=group_id,
            samples=self.config.samples_per_prompt,
            reason=DropReason.REJECTED,
            detail=reason,
            origin=origin,
        )
        self._emit(GroupDropped(group=dropped))


def _expired(lease: Lease) -> Expired:
    return Expired(kind=lease.kind, lease_id=lease.lease_id, holder=lease.holder, group_ids=lease.group_ids)
