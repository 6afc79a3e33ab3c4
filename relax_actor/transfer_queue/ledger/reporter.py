"""The questions a ledger answers about itself, without a change of what it knows."""

from collections.abc import Iterator

from relax_actor.ids import GroupId, PolicyVersion
from relax_actor.protocol import Accounting, TensorRef
from relax_actor.transfer_queue.ledger import report, waiting
from relax_actor.transfer_queue.ledger.decider import Decider
from relax_actor.transfer_queue.records import DroppedGroup, DroppedSample, TrainedSet


class Reporter(Decider):
    """A ledger as those see it who watch a run."""

    @property
    def version(self) -> PolicyVersion | None:
        """The newest published policy version."""
        return self._state.version

    @property
    def open_evals(self) -> int:
        """Evaluation prompts whose result was not handed out yet."""
        return len(self._state.groups) - self._state.train_groups

    @property
    def finished_evals(self) -> frozenset[GroupId]:
        """Evaluation prompts that are settled and whose result was not handed out yet."""
        return frozenset(self._state.finished_evals)

    @property
    def regenerated(self) -> int:
        """Train samples that rewinds threw away."""
        return self._state.totals.regenerated

    def accounting(self) -> Accounting:
        """Return where every train sample is; balances after every event (I2)."""
        return report.accounting(self._state)

    def dropped_by_reason(self) -> dict[str, int]:
        """Return dropped train samples by reason; they add up to `Accounting.dropped`."""
        return report.dropped_by_reason(self._state)

    def take_dropped(self) -> list[DroppedGroup | DroppedSample]:
        """Return what was dropped since the last call, for the event log."""
        taken, self._state.drop_log = self._state.drop_log, []
        return taken

    def waiting_on(self) -> str:
        """Say in a sentence what the trainer waits for, as of the last `now`."""
        return waiting.waiting_on(self._state, wanted=self._wanted(), room=self.room(), now=self._now_s)

    def hopeless(self) -> str:
        """Say why no batch will ever be complete, or nothing."""
        return report.hopeless(self._state)

    def take_freed(self) -> list[str]:
        """Return the segments that lost their last array since the last call."""
        taken, self._state.freed = self._state.freed, []
        return [segment for segment in dict.fromkeys(taken) if segment not in self._state.references]

    def segments(self) -> frozenset[str]:
        """Return the segments that are needed; after a restart, all others of the queue can go."""
        return frozenset(self._state.references)

    def needs(self, segment: str) -> bool:
        """Return whether a row is in this segment."""
        return segment in self._state.references

    def holdings(self) -> Iterator[tuple[GroupId, TensorRef]]:
        """Yield every array that is needed, with the group it is for."""
        for group_id, group in self._state.groups.items():
            yield from ((group_id, ref) for ref in group.prompt_refs)
            yield from ((group_id, ref) for row in group.rows for ref in row.refs)

    def has_batch(self) -> bool:
        """Whether the trainer has a batch or could have one."""
        batch, complete = self._state.leases.batch, sum(map(len, self._state.index.complete.values()))
        if batch is not None and batch.is_whole:
            return True
        return 0 < self._wanted() - (len(batch.dealt) if batch else 0) <= complete

    def finished(self) -> bool:
        """Whether nothing is left to train."""
        state = self._state
        return self._left() == 0 or (state.stream_ended and state.train_groups == 0)

    def room(self) -> int:
        """Return how many train prompts may be submitted now."""
        state = self._state
        if state.stream_ended:
            return 0
        return max(0, min(self.config.window, self._left()) - self._unreplaced() - state.train_groups)

    def next_group(self) -> GroupId:
        """Return the position of the prompt stream to submit next: the lowest that is still to come."""
        return self._state.positions.next()

    def upcoming(self) -> tuple[GroupId, ...]:
        """Return the positions of the prompt stream that may be submitted now, in order."""
        return tuple(self._state.positions.upcoming(self.room()))

    def trained_groups(self) -> TrainedSet:
        """Return which positions are done with: a part of every checkpoint."""
        return report.trained_set(self._state)

    def _wanted(self) -> int:
        """Return how many groups the next batch has."""
        wanted = min(self.config.groups_per_batch, self._left())
        is_all_there = self._state.stream_ended or self._is_refilled()  # all that will come
        return min(wanted, self._state.train_groups) if is_all_there else wanted

    def _left(self) -> int:
        """Return how many groups the run has still to train."""
        totals = self._state.totals
        return max(0, self.config.total_groups - totals.trained_groups - totals.missed)

    def _is_refilled(self) -> bool:
        """Whether the next batch gets no further groups, because so many were filtered and replaced."""
        return self._unreplaced() > 0 and self.room() == 0

    def _unreplaced(self) -> int:
        """Return how many filtered groups are not to be replaced before the next batch."""
        return max(0, self._state.totals.filtered - self.config.max_filtered)

    def _is_settled(self) -> bool:
        """Whether every group that is here can be trained, or none is here."""
        return sum(map(len, self._state.index.complete.values())) == self._state.train_groups
