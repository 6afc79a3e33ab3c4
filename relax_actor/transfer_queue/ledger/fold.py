"""The fold: how each event changes what the ledger knows.

Nothing is decided here, so that replaying a journal is the same as having lived it.
"""

from functools import singledispatch

from relax_actor.ids import SampleIndex
from relax_actor.protocol import Purpose
from relax_actor.transfer_queue.events import (
    BatchAcked,
    BatchExtended,
    BatchLeased,
    ChunkPut,
    EvalReported,
    Event,
    Fenced,
    GroupDropped,
    LeaseEnded,
    PartialsEnded,
    PromptLeased,
    Published,
    RewardLeased,
    RewardsPut,
    Rewound,
    SampleDropped,
    SamplesPut,
    StreamEnded,
    Submitted,
)
from relax_actor.transfer_queue.ledger.groups import Group, RowState, ended_sample
from relax_actor.transfer_queue.ledger.leases import Lease
from relax_actor.transfer_queue.ledger.rewind import rewind
from relax_actor.transfer_queue.ledger.state import LedgerState
from relax_actor.transfer_queue.records import DroppedGroup, DroppedSample, DropReason, LeaseKind, RowKey


@singledispatch
def _apply(event: Event, state: LedgerState) -> None:
    raise TypeError(f"{event!r} given to {state!r} is no event of the ledger")


def apply(state: LedgerState, event: Event) -> None:
    """Make the state what it is after `event`, which must be possible in it."""
    _apply.dispatch(type(event))(event, state)


@_apply.register
def _submitted(event: Submitted, state: LedgerState) -> None:
    state.add(event.group)


@_apply.register
def _stream_ended(_: StreamEnded, state: LedgerState) -> None:
    state.stream_ended = True


@_apply.register
def _prompt_leased(event: PromptLeased, state: LedgerState) -> None:
    group = state.groups[event.group_id]
    group.holder = group.sampled_by = event.holder
    group.sampled_at = event.version
    for index in event.rows:
        state.move(group, index, RowState.RUNNING, event.lease_id)
        chunk = group.rows[index].chunk
        group.rows[index].version = event.version if chunk is None else chunk.oldest_version
    state.start_clock(group, event.since_s, event.group_until_s)
    _add_lease(state, event, LeaseKind.PROMPT, {(event.group_id, index) for index in event.rows})
    state.index.file(group)


@_apply.register
def _samples_put(event: SamplesPut, state: LedgerState) -> None:
    for sample in event.samples:
        state.keep_sample(state.groups[sample.group_id], sample)
    for group_id in {sample.group_id for sample in event.samples}:
        state.groups[group_id].let_go()
        state.index.file(state.groups[group_id])


@_apply.register
def _chunk_put(event: ChunkPut, state: LedgerState) -> None:
    group = state.groups[event.chunk.group_id]
    state.keep_chunk(group, event.chunk)
    state.index.file(group)


@_apply.register
def _partials_ended(event: PartialsEnded, state: LedgerState) -> None:
    group = state.groups[event.group_id]
    for chunk in filter(None, [group.rows[index].chunk for index in event.rows]):
        state.keep_sample(group, ended_sample(chunk))
    group.let_go()
    state.set_deadline(group, event.group_until_s)
    state.index.file(group)


@_apply.register
def _reward_leased(event: RewardLeased, state: LedgerState) -> None:
    for group_id, index in event.rows:
        state.move(state.groups[group_id], index, RowState.SCORING, event.lease_id)
    _add_lease(state, event, LeaseKind.REWARD, set(event.rows))


@_apply.register
def _rewards_put(event: RewardsPut, state: LedgerState) -> None:
    for reward in event.rewards:
        group = state.groups[reward.group_id]
        row = group.rows[reward.sample_index]
        row.reward, row.reward_lease_id = reward.reward, reward.lease_id
        state.move(group, reward.sample_index, RowState.SCORED)
    for group_id in dict.fromkeys(reward.group_id for reward in event.rewards):
        _settle(state, state.groups[group_id])


@_apply.register
def _sample_dropped(event: SampleDropped, state: LedgerState) -> None:
    group = state.groups[event.group_id]
    row = group.rows[event.sample_index]
    row.reward_lease_id, row.detail = row.lease_id, event.detail
    state.drop_row(group, event.sample_index)
    group.let_go()
    state.drop_log.append(
        DroppedSample(
            group_id=event.group_id,
            sample_index=event.sample_index,
            reason=DropReason.UNSCORED,
            detail=event.detail,
            origin=group.prompt.origin,
        )
    )
    _settle(state, group)


@_apply.register
def _group_dropped(event: GroupDropped, state: LedgerState) -> None:
    dropped = event.group
    group = state.groups.get(dropped.group_id)
    state.drop_log.append(dropped)
    if group is not None and group.prompt.purpose is Purpose.EVAL:
        _give_up_eval(state, group, dropped)
        return
    if group is None:
        state.positions.take(dropped.group_id)
        state.totals.submitted += dropped.samples
    else:
        state.forget(group)
    state.positions.settle(dropped.group_id)
    state.drops.add(dropped.group_id, dropped.samples, dropped.reason)
    state.last_dropped = dropped
    state.totals.dropped += dropped.samples
    state.totals.drops_in_a_row += 1
    state.totals.filtered += dropped.reason is DropReason.ZERO_VARIANCE


@_apply.register
def _batch_leased(event: BatchLeased, state: LedgerState) -> None:
    _deal(state, event)
    _add_lease(state, event, LeaseKind.BATCH, set())
    state.leases.extend(event.lease_id, event.group_ids, event.until_s, is_whole=event.is_whole)


@_apply.register
def _batch_extended(event: BatchExtended, state: LedgerState) -> None:
    _deal(state, event)
    state.leases.extend(event.lease_id, event.group_ids, event.until_s, is_whole=event.is_whole)


@_apply.register
def _batch_acked(event: BatchAcked, state: LedgerState) -> None:
    group_ids = state.leases.remove(event.trained.lease_id).group_ids
    for group_id in group_ids:
        group = state.groups[group_id]
        state.totals.trained += group.count(RowState.SCORED)
        state.totals.unscored += group.count(RowState.DROPPED)
        state.totals.trained_groups += 1
        state.positions.settle(group_id)
        state.forget(group)
    if group_ids:  # a run that only ever skips is hopeless
        state.totals.drops_in_a_row = 0
    state.totals.filtered -= state.dealt.filtered
    state.totals.missed += state.config.groups_per_batch - len(group_ids)
    state.last_acked = event.trained.lease_id
    state.version = event.trained.policy_version


@_apply.register
def _published(event: Published, state: LedgerState) -> None:
    state.version = event.version


@_apply.register
def _lease_ended(event: LeaseEnded, state: LedgerState) -> None:
    lease = state.leases.remove(event.lease_id)
    for group_id, index in sorted(lease.rows):
        group = state.groups[group_id]
        if lease.kind is LeaseKind.PROMPT:
            state.return_row(group, index)
        elif lease.kind is LeaseKind.REWARD:
            group.rows[index].attempts += event.failed
            state.move(group, index, RowState.SAMPLED)
    for group_id in lease.group_ids:
        _end_in_group(state.groups[group_id], lease.kind, failed=event.failed)
        state.index.file(state.groups[group_id])


@_apply.register
def _fenced(event: Fenced, state: LedgerState) -> None:
    state.fences[event.name] = event.incarnation


@_apply.register
def _rewound(event: Rewound, state: LedgerState) -> None:
    rewind(state, event.trained)
    state.version = event.version


@_apply.register
def _eval_reported(event: EvalReported, state: LedgerState) -> None:
    del state.finished_evals[event.group_id]
    state.forget(state.groups[event.group_id])


def _add_lease(
    state: LedgerState, event: PromptLeased | RewardLeased | BatchLeased, kind: LeaseKind, rows: set[RowKey]
) -> None:
    state.leases.add(
        Lease(
            lease_id=event.lease_id,
            kind=kind,
            holder=event.holder,
            rows=rows,
            since_s=event.since_s,
            until_s=event.until_s,
            version=None if isinstance(event, RewardLeased) else event.version,
        )
    )


def _deal(state: LedgerState, event: BatchLeased | BatchExtended) -> None:
    for group_id in event.group_ids:
        state.groups[group_id].dealt = True
        state.index.file(state.groups[group_id])
    state.dealt = event.sampling


def _end_in_group(group: Group, kind: LeaseKind, *, failed: bool) -> None:
    if kind is LeaseKind.BATCH:
        group.dealt = False
    if kind is LeaseKind.PROMPT:
        group.attempts += failed
        group.let_go()
        if group.holder is None:
            group.until_s = None  # waiting for a rollout is nobody's delay; attempts are bounded instead


def _settle(state: LedgerState, group: Group) -> None:
    state.index.file(group)
    if not group.is_train and group.complete:
        state.finished_evals[group.group_id] = ""


def _give_up_eval(state: LedgerState, group: Group, dropped: DroppedGroup) -> None:
    for index, row in enumerate(group.rows):
        if row.state is not RowState.SCORED:
            state.drop_row(group, SampleIndex(index))
    group.let_go()
    state.index.file(group)
    state.finished_evals[group.group_id] = f"{dropped.reason}: {dropped.detail}"
