"""Going back to what a checkpoint has trained, while the queue lives on.

Every lease ends and every sample that was not trained is thrown away, for it was sampled from weights the
trainer no longer has. Prompts stay if they are among the next ones anyhow; later ones are withdrawn and come
again from the prompt stream, so that a run with `max_staleness` 0 deals the same batches as an undisturbed
one. What was dropped stays dropped.
"""

from relax_actor.ids import GroupId, SampleIndex
from relax_actor.transfer_queue.ledger.groups import Group, RowState
from relax_actor.transfer_queue.ledger.positions import Positions
from relax_actor.transfer_queue.ledger.state import LedgerState
from relax_actor.transfer_queue.records import TrainedSet

_SAMPLED = (RowState.SAMPLED, RowState.SCORING, RowState.SCORED)


def rewind(state: LedgerState, trained: TrainedSet) -> None:
    """Make `trained` all that is trained; what else was submitted is unsampled or withdrawn."""
    for lease_id in list(state.leases.leases):
        state.leases.remove(lease_id)
    state.totals.regenerated += _discarded(state, trained)
    state.drops = state.drops.gone_back(trained)
    dropped = (each.group_id for each in state.drops.since(trained.watermark))
    settled = {position for position in (*trained.extras, *dropped) if position >= trained.watermark}
    keep = _next_positions(Positions(trained.watermark, settled), state.config.window)
    for group in list(state.groups.values()):
        _unsample_or_withdraw(state, group, keep)
    outstanding = [group.group_id for group in state.groups.values() if group.is_train]
    state.positions = Positions(trained.watermark, settled, outstanding)
    state.stream_ended = False
    _recount(state, trained)


def _discarded(state: LedgerState, trained: TrainedSet) -> int:
    sampled = sum(state.rows[row_state] for row_state in _SAMPLED)
    return sampled + max(0, state.totals.trained - trained.samples)


def _next_positions(positions: Positions, count: int) -> set[GroupId]:
    upwards = positions.unsettled()
    return {next(upwards) for _ in range(count)}


def _unsample_or_withdraw(state: LedgerState, group: Group, keep: set[GroupId]) -> None:
    if group.is_train and group.group_id not in keep:
        state.forget(group)
    elif group.group_id not in state.finished_evals:
        for index in range(len(group.rows)):
            state.reset_row(group, SampleIndex(index))
        group.holder, group.until_s, group.dealt = None, None, False
        state.index.file(group)


def _recount(state: LedgerState, trained: TrainedSet) -> None:
    totals = state.totals
    totals.trained, totals.trained_groups = trained.samples, trained.groups
    totals.unscored = trained.unscored
    totals.dropped = sum(state.drops.samples.values())
    totals.submitted = totals.trained + totals.unscored + totals.dropped + sum(state.rows)
    totals.missed = trained.missed
    totals.drops_in_a_row = totals.filtered = 0
