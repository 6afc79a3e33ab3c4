"""Every record the roles exchange, in the order the data flows round the loop.

prompts -> TransferQueue -> rollout -> TransferQueue -> reward -> TransferQueue -> trainer -> DCS -> rollout

Arrays never travel in a message: they are written once into shared memory and named by a `TensorRef`.
A record only ever grows at the end, by fields with defaults. Those of which there are many hold nothing that
could hold them (`gc=False`): the collector need not look at them.
"""

from enum import StrEnum

import msgspec

from relax_actor.ids import GroupId, LeaseId, PolicyVersion, SampleIndex


class Purpose(StrEnum):
    """What a group of samples is for."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why a sample has no further tokens."""

    STOP = "stop"  # a stop token or stop string; the stop token is the sample's last token
    LENGTH = "length"  # max_new_tokens or the model's context
    ABORT = "abort"  # ended from outside; the tokens so far are valid


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """Where an array lies: C-contiguous, at a byte offset of a shared-memory segment."""

    segment: str
    offset: int
    dtype: str  # numpy name: int32, float32, ...
    shape: tuple[int, ...]


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer to queue, first of all: go on from here; whatever is not in `trained` is sampled anew."""

    step: int  # steps done
    policy_version: PolicyVersion  # published already, higher than any before
    trained: str = ""  # JSON of the queue's own record out of the checkpoint; empty at step 0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Queue to prompts: put these positions of the prompt stream, and these rounds of evaluation prompts."""

    groups: tuple[GroupId, ...] = ()
    eval_rounds: tuple[int, ...] = ()


class PromptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to queue, once a group: a prompt of which `samples` completions are wanted."""

    group_id: GroupId
    tokens: TensorRef  # int32 [prompt tokens]
    samples: int
    label: str  # the reference answer, as the dataset has it
    origin: str  # file:line of the row
    purpose: Purpose = Purpose.TRAIN
    eval_set: str = ""
    extra: dict[str, object] = {}
    eval_round: int = -1  # the step after which it is evaluated
    media: dict[str, TensorRef] = {}  # what the prompt's placeholder tokens stand for, as the model takes it


class SampleChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout to queue, while it samples: all tokens so far, for whoever goes on if it cannot."""

    group_id: GroupId
    sample_index: SampleIndex
    lease_id: LeaseId
    tokens: TensorRef  # int32 [response tokens so far], at least one
    logprobs: TensorRef  # float32, as in `SampleReady`
    versions: TensorRef  # int32, as in `SampleReady`
    oldest_version: PolicyVersion
    newest_version: PolicyVersion
    routed_experts: TensorRef | None = None  # as in `SampleReady`

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.tokens.shape[0]


class PromptLease(msgspec.Struct, frozen=True, kw_only=True):
    """Queue to rollout: sample these completions of this prompt, before the lease ends."""

    lease_id: LeaseId
    group: PromptGroup
    missing: tuple[SampleIndex, ...]  # the completions nobody has put yet
    policy_version: PolicyVersion  # the version that must sample the first token
    chunks: tuple[SampleChunk, ...] = ()  # what earlier leases have sampled of `missing`: go on after it


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """Queue to rollout: what to sample, and which version must be installed before more is leased."""

    prompts: tuple[PromptLease, ...] = ()
    policy_version: PolicyVersion | None = None  # the newest published one


class SampleReady(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Rollout to queue, once a sample: finished and readable."""

    group_id: GroupId
    sample_index: SampleIndex
    lease_id: LeaseId
    tokens: TensorRef  # int32 [response tokens], the stop token included
    logprobs: TensorRef  # float32 [response tokens], natural log, of logits / temperature, as sampled
    versions: TensorRef  # int32 [response tokens], the policy version that sampled each token
    oldest_version: PolicyVersion
    newest_version: PolicyVersion
    finish_reason: FinishReason
    continued_tokens: int = 0  # how many of the first tokens earlier leases have sampled
    routed_experts: TensorRef | None = None
    """uint8 or uint16 [prompt + response tokens - 1, MoE layers, top_k], see `relax_actor.rl.routing`."""


class RewardTask(msgspec.Struct, frozen=True, kw_only=True):
    """Queue to reward actor: score this sample."""

    lease_id: LeaseId
    group_id: GroupId
    sample_index: SampleIndex
    tokens: TensorRef  # int32 [response tokens]
    label: str
    origin: str
    finish_reason: FinishReason
    extra: dict[str, object] = {}


class RewardReady(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Reward actor to queue, once a sample: its reward, or why it has none."""

    group_id: GroupId
    sample_index: SampleIndex
    lease_id: LeaseId
    reward: float | None  # finite, or None when rejected
    reason: str = ""  # why it was rejected


class TrainSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sample of a batch as the trainer gets it."""

    group_id: GroupId
    sample_index: SampleIndex
    prompt: TensorRef
    tokens: TensorRef
    logprobs: TensorRef
    versions: TensorRef
    oldest_version: PolicyVersion
    reward: float
    finish_reason: FinishReason
    media: dict[str, TensorRef] = {}  # the prompt's
    routed_experts: TensorRef | None = None  # as in `SampleReady`


class BatchSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch came together, in groups."""

    filtered: int = 0  # dropped for equal rewards since the batch before
    refilled: int = 0  # of those, how many were replaced by further prompts
    carried: int = 0  # could be trained and stay for the next batch
    skipped: str = ""  # why the batch is empty


class BatchLease(msgspec.Struct, frozen=True, kw_only=True):
    """Queue to trainer: whole groups, to train on and then acknowledge; sorted by group and sample.

    Of a batch that is lent in parts, each is so many groups more; they are acknowledged as one.
    """

    lease_id: LeaseId
    samples: tuple[TrainSample, ...]
    policy_version: PolicyVersion  # the trainer's version, from which staleness is counted
    sampling: BatchSampling = BatchSampling()
    is_whole: bool = True  # no further part follows
    groups_so_far: int = 0  # of the batch, those of this part included


class BatchTrained(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer to queue, after the optimizer step and the publish."""

    lease_id: LeaseId
    step: int  # steps done, this one included
    policy_version: PolicyVersion  # the version published by this step; of an empty batch the one before


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Invariant I2: submitted == trained + dropped + running + queued, in training samples."""

    submitted: int
    trained: int
    dropped: int
    running: int  # leased to a rollout and not finished
    queued: int  # everything else: waiting for a rollout, a reward or the trainer

    @property
    def balances(self) -> bool:
        """Whether no sample is lost or counted twice."""
        return self.submitted == self.trained + self.dropped + self.running + self.queued
