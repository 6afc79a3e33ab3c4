"""A prompt and the state of each of its samples."""

from dataclasses import dataclass, field
from enum import IntEnum

from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion, SampleIndex
from relax_actor.protocol import (
    FinishReason,
    PromptGroup,
    Purpose,
    RewardTask,
    SampleChunk,
    SampleReady,
    TensorRef,
    TrainSample,
)
from relax_actor.rl.routing import routed_tokens
from relax_actor.transfer_queue.records import EvalResult


class RowState(IntEnum):
    """Where a sample is on its way round the loop; backwards only when a lease ends without it.

    Numbers, for they index the counts.
    """

    WAITING = 0  # for a rollout
    RUNNING = 1  # leased to a rollout
    SAMPLED = 2  # waits for a reward actor
    SCORING = 3  # leased to a reward actor
    SCORED = 4  # waits for its group, or for the trainer
    DROPPED = 5


def no_rows() -> list[int]:
    """Return a count of rows by state, of no rows."""
    return [0] * len(RowState)


@dataclass(slots=True)
class Row:
    """One sample."""

    state: RowState = RowState.WAITING
    lease_id: LeaseId | None = None  # while running or scoring
    version: PolicyVersion | None = None  # of its oldest token; while running, of its lease
    chunk: SampleChunk | None = None  # until sampled: what there is of it, for the next lease to go on from
    sample: SampleReady | None = None  # since sampled; kept when dropped, to know a duplicate
    reward: float | None = None
    reward_lease_id: LeaseId | None = None  # under which it was scored or dropped
    attempts: int = 0  # reward leases that ended without a reward
    detail: str = ""  # why it was dropped

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """Return the arrays this row keeps in shared memory."""
        held = self.chunk or self.sample
        if held is None or self.state is RowState.DROPPED:
            return ()
        routes = () if held.routed_experts is None else (held.routed_experts,)
        return (held.tokens, held.logprobs, held.versions, *routes)


@dataclass(slots=True)
class Group:
    """One prompt with its rows."""

    prompt: PromptGroup
    rows: list[Row] = field(default_factory=list)
    counts: list[int] = field(default_factory=no_rows)  # rows by state
    holder: Holder | None = None  # the one rollout that samples it now
    sampled_by: Holder | None = None  # the one that had it last, and has its prefix
    sampled_at: PolicyVersion | None = None  # with this version
    attempts: int = 0  # prompt leases that ended without all samples
    until_s: float | None = None  # the deadline; None while no rollout has had it
    since_s: float = 0.0  # when the clock of the deadline was started
    dealt: bool = False  # in the trainer's hands

    @classmethod
    def of(cls, prompt: PromptGroup) -> "Group":
        """Return a group of which nothing is sampled."""
        counts = no_rows()
        counts[RowState.WAITING] = prompt.samples
        return cls(prompt, [Row() for _ in range(prompt.samples)], counts)

    @property
    def group_id(self) -> GroupId:
        """Return the position in the prompt stream."""
        return self.prompt.group_id

    @property
    def prompt_refs(self) -> tuple[TensorRef, ...]:
        """Return the arrays of the prompt, which all rows share."""
        return (self.prompt.tokens, *self.prompt.media.values())

    @property
    def is_train(self) -> bool:
        """Whether it is trained on, not only looked at."""
        return self.prompt.purpose is Purpose.TRAIN

    @property
    def complete(self) -> bool:
        """Whether every sample is scored or dropped."""
        return self.counts[RowState.SCORED] + self.counts[RowState.DROPPED] == len(self.rows)

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Return the lowest version of any token that may be trained; None while nothing has started."""
        return min([row.version for row in self.rows if row.version is not None], default=None)

    @property
    def rewards(self) -> list[float]:
        """The rewards of the scored samples, in order."""
        return [row.reward for row in self.rows if row.reward is not None]

    def count(self, state: RowState) -> int:
        """Return how many rows are in `state`."""
        return self.counts[state]

    def indices(self, state: RowState) -> list[SampleIndex]:
        """Return the rows in `state`, in order."""
        return [SampleIndex(i) for i, row in enumerate(self.rows) if row.state is state]

    def let_go(self) -> None:
        """Let any rollout have what is left, once no sample is running."""
        if not self.counts[RowState.RUNNING]:
            self.holder = None


def ended_sample(chunk: SampleChunk) -> SampleReady:
    """Return a sample of the tokens that there are: valid, but ended from outside."""
    return SampleReady(
        group_id=chunk.group_id,
        sample_index=chunk.sample_index,
        lease_id=chunk.lease_id,
        tokens=chunk.tokens,
        logprobs=chunk.logprobs,
        versions=chunk.versions,
        oldest_version=chunk.oldest_version,
        newest_version=chunk.newest_version,
        finish_reason=FinishReason.ABORT,
        continued_tokens=chunk.length,
        routed_experts=chunk.routed_experts,
    )


def has_fitting_routes(prompt: PromptGroup, row: SampleReady | SampleChunk) -> bool:
    """Whether the routed experts, if there are any, are those of as many tokens as there are."""
    routes = row.routed_experts
    return routes is None or routes.shape[0] == routed_tokens(prompt.tokens.shape[0], row.tokens.shape[0])


def reward_task(group: Group, index: SampleIndex, lease_id: LeaseId) -> RewardTask:
    """Return what a reward actor gets of a sampled row."""
    sample = _sample(group.rows[index])
    return RewardTask(
        lease_id=lease_id,
        group_id=group.group_id,
        sample_index=index,
        tokens=sample.tokens,
        label=group.prompt.label,
        origin=group.prompt.origin,
        finish_reason=sample.finish_reason,
        extra=group.prompt.extra,
    )


def train_samples(group: Group) -> list[TrainSample]:
    """Return what the trainer gets of a complete group: its scored rows, in order."""
    return [_train_sample(group.prompt, row) for row in group.rows if row.state is RowState.SCORED]


def eval_result(group: Group, detail: str) -> EvalResult:
    """Return what an evaluation prompt came to."""
    rewards = tuple(group.rewards)
    details = [row.detail for row in group.rows if row.detail]
    return EvalResult(
        eval_set=group.prompt.eval_set,
        group_id=group.group_id,
        policy_version=group.oldest_version,
        rewards=rewards,
        missing=len(group.rows) - len(rewards),
        detail=detail or "; ".join(sorted(set(details))),
    )


def _train_sample(prompt: PromptGroup, row: Row) -> TrainSample:
    sample = _sample(row)
    if row.reward is None:
        raise ValueError(f"a scored row of group {prompt.group_id} has no reward")
    return TrainSample(
        group_id=prompt.group_id,
        sample_index=sample.sample_index,
        prompt=prompt.tokens,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        versions=sample.versions,
        oldest_version=sample.oldest_version,
        reward=row.reward,
        finish_reason=sample.finish_reason,
        media=prompt.media,
        routed_experts=sample.routed_experts,
    )


def _sample(row: Row) -> SampleReady:
    if row.sample is None:
        raise ValueError(f"a {row.state.name} row has no sample")
    return row.sample
