"""What keeps the trainer from its next batch, in one sentence a person can act on."""

from relax_actor.ids import Holder, LeaseId
from relax_actor.transfer_queue.ledger.groups import Group, RowState
from relax_actor.transfer_queue.ledger.state import LedgerState

_LINES = {
    RowState.WAITING: "wait for a rollout",
    RowState.RUNNING: "run",
    RowState.SAMPLED: "wait for a reward actor",
    RowState.SCORING: "are being scored",
}


def waiting_on(state: LedgerState, *, wanted: int, room: int, now: float) -> str:
    """Say what the trainer waits for.

    Args:
        state: of the ledger.
        wanted: groups of the next batch; 0 when the run is over.
        room: prompts that may be submitted.
        now: seconds of the queue's clock.
    """
    lease = state.leases.batch
    if lease is not None and lease.is_whole:
        return f"{lease.holder} to train on {len(lease.group_ids)} groups, for {now - lease.since_s:.1f} s"
    if wanted == 0:
        return "nothing: every group is trained or dropped"
    if state.version is None:
        return "the first policy version to be published"
    blocking = _blocking(state)
    if blocking is not None:
        return describe(state, blocking, now)
    if room:
        return f"prompts: {room} more may be submitted, {state.train_groups} of {wanted} groups are here"
    return "nothing: a batch is ready"


def describe(state: LedgerState, group: Group, now: float) -> str:
    """Name an incomplete group, the states of its samples, who has them and for how long."""
    parts = [_line(state, group, row_state, now) for row_state in _LINES if group.count(row_state)]
    return f"group {group.group_id} ({group.prompt.origin}): {'; '.join(parts)}"


def _blocking(state: LedgerState) -> Group | None:
    """Return the incomplete train group that must be trained first."""
    incomplete = [group for group in state.groups.values() if group.is_train and not group.complete]
    return min(incomplete, key=_urgency, default=None)


def _urgency(group: Group) -> tuple[float, int]:
    version = group.oldest_version
    return (float("inf") if version is None else version, group.group_id)


def _line(state: LedgerState, group: Group, row_state: RowState, now: float) -> str:
    line = f"{group.count(row_state)} of {len(group.rows)} samples {_LINES[row_state]}"
    lease_ids = {row.lease_id for row in group.rows if row.state is row_state}
    loans = sorted(_loan(state, lease_id) for lease_id in lease_ids if lease_id is not None)
    held = ", ".join(f"{holder} for {now - since_s:.1f} s" for holder, since_s in loans)
    return f"{line} on {held}" if held else line


def _loan(state: LedgerState, lease_id: LeaseId) -> tuple[Holder, float]:
    lease = state.leases.leases[lease_id]
    return lease.holder, lease.since_s
