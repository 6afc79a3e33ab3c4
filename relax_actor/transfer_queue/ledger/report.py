"""What can be said about a ledger's state, without changing it."""

from collections import Counter

from relax_actor.protocol import Accounting
from relax_actor.transfer_queue.ledger.groups import RowState
from relax_actor.transfer_queue.ledger.state import LedgerState
from relax_actor.transfer_queue.records import DropReason, TrainedSet


def accounting(state: LedgerState) -> Accounting:
    """Return where every train sample is (invariant I2); each term is kept by itself."""
    rows, totals = state.rows, state.totals
    return Accounting(
        submitted=totals.submitted,
        trained=totals.trained,
        dropped=totals.dropped + totals.unscored + rows[RowState.DROPPED],
        running=rows[RowState.RUNNING],
        queued=rows[RowState.WAITING]
        + rows[RowState.SAMPLED]
        + rows[RowState.SCORING]
        + rows[RowState.SCORED],
    )


def dropped_by_reason(state: LedgerState) -> dict[str, int]:
    """Return dropped train samples by reason; the values add up to `Accounting.dropped`."""
    samples = Counter({DropReason.UNSCORED: state.totals.unscored + state.rows[RowState.DROPPED]})
    samples.update(state.drops.samples)
    return {str(reason): count for reason, count in sorted(samples.items()) if count}


def trained_set(state: LedgerState) -> TrainedSet:
    """Return what a checkpoint has to remember."""
    watermark = state.positions.watermark
    dropped = state.drops.since(watermark)
    extras = state.positions.extras - {each.group_id for each in dropped}
    return TrainedSet(
        watermark=watermark,
        extras=tuple(sorted(extras)),
        dropped=tuple(dropped),
        dropped_before=state.drops.before(watermark),
        groups=state.totals.trained_groups,
        samples=state.totals.trained,
        unscored=state.totals.unscored,
        missed=state.totals.missed,
    )


def hopeless(state: LedgerState) -> str:
    """Say why no batch will come out of this; empty while there is hope.

    A reward function that always raises, or a model that no prompt fits, drops every group: replacing them
    for ever would look like progress.
    """
    count, limit = state.totals.drops_in_a_row, state.config.refill_limit
    last = state.last_dropped
    if last is None or count <= limit:
        return ""
    return (
        f"{count} groups were dropped since the last trained batch (limit {limit}); "
        f"the last one, group {last.group_id} ({last.origin}): {last.reason}: {last.detail}"
    )
