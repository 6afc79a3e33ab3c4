"""What the TransferQueue's ledger decides, says and remembers: small, immutable, serialisable records.

Every decision of the ledger is a list of events. An event states a fact in the past and holds all that is
needed to apply it again, so that a journal of events is the ledger (see `ledger` and `journal`).
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion, SampleIndex
from relax_actor.protocol import (
    BatchSampling,
    BatchTrained,
    PromptGroup,
    RewardReady,
    SampleChunk,
    SampleReady,
)

RowKey = tuple[GroupId, SampleIndex]
"""What identifies a row of the queue."""


class Put(StrEnum):
    """What became of something put into the queue; none of them is to be sent again."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # it is here already: the answer to the first attempt got lost
    STALE = "stale"  # its lease has ended: someone else does the work, or nobody needs it
    MISFIT = "misfit"  # its arrays do not fit one another; its lease ends


class DropReason(StrEnum):
    """Why samples will never be trained."""

    REJECTED = "rejected"  # the prompt cannot be sampled at all
    UNSCORED = "unscored"  # one sample without a reward
    FEW_VALID = "few valid samples"
    ZERO_VARIANCE = "zero_variance"  # all its rewards are equal
    POISON = "poison"  # whoever samples it dies
    DEADLINE = "deadline"
    SURPLUS = "surplus"  # the run was over before it was trained
    STALE = "stale"


class Refusal(StrEnum):
    """Why a message was not acted on; counted."""

    OLD_INCARNATION = "old incarnation"
    STALE_LEASE = "stale lease"
    DUPLICATE = "duplicate"
    VERSION = "other policy version"
    OUT_OF_TURN = "out of turn"  # a prompt without room, or not the next one
    ROUTED_EXPERTS = "routed experts of another length"


class LeaseKind(StrEnum):
    """What is on loan."""

    PROMPT = "prompt"
    REWARD = "reward"
    BATCH = "batch"


class DroppedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that will never be trained, and why."""

    group_id: GroupId
    samples: int
    reason: DropReason
    detail: str
    origin: str


class DroppedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that will not be trained though its group may be."""

    group_id: GroupId
    sample_index: SampleIndex
    reason: DropReason
    detail: str
    origin: str


class DroppedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """A position of the prompt stream that will never be trained."""

    group_id: GroupId
    samples: int
    reason: DropReason


class TrainedSet(msgspec.Struct, frozen=True, kw_only=True):
    """Which positions of the prompt stream are done with; a part of every checkpoint, JSON-able.

    As long as the stream is never far ahead of its slowest group it stays small, however many were dropped.
    """

    watermark: GroupId = GroupId(0)  # every position below is trained or dropped
    extras: tuple[GroupId, ...] = ()  # trained positions at or above the watermark
    dropped: tuple[DroppedPosition, ...] = ()  # at or above the watermark; elsewhere they are only counted
    groups: int = 0  # trained
    samples: int = 0  # trained
    unscored: int = 0  # samples dropped from groups that were trained
    missed: int = 0  # groups by which batches were short
    dropped_before: dict[DropReason, int] = {}  # samples dropped below the watermark


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that ran out: who was late, with what."""

    kind: LeaseKind
    lease_id: LeaseId
    holder: Holder
    group_ids: tuple[GroupId, ...]


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation prompt whose samples are all scored or given up."""

    eval_set: str
    group_id: GroupId
    policy_version: PolicyVersion | None  # the oldest that sampled it; None when nothing was sampled
    rewards: tuple[float, ...]  # of the scored samples, by sample index
    missing: int  # samples without a reward
    detail: str = ""  # why some are missing

    @property
    def mean_reward(self) -> float | None:
        """Mean over the scored samples; None without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


class Submitted(msgspec.Struct, frozen=True, kw_only=True, tag="submitted"):
    """A prompt entered the queue."""

    group: PromptGroup


class StreamEnded(msgspec.Struct, frozen=True, kw_only=True, tag="stream_ended"):
    """No further prompt will come."""


class PromptLeased(msgspec.Struct, frozen=True, kw_only=True, tag="prompt_leased"):
    """A rollout took samples of one prompt."""

    lease_id: LeaseId
    holder: Holder
    group_id: GroupId
    rows: tuple[SampleIndex, ...]
    version: PolicyVersion
    since_s: float
    until_s: float
    group_until_s: float


class SamplesPut(msgspec.Struct, frozen=True, kw_only=True, tag="samples_put"):
    """A rollout finished samples."""

    samples: tuple[SampleReady, ...]


class RewardLeased(msgspec.Struct, frozen=True, kw_only=True, tag="reward_leased"):
    """A reward actor took samples to score."""

    lease_id: LeaseId
    holder: Holder
    rows: tuple[RowKey, ...]
    since_s: float
    until_s: float


class RewardsPut(msgspec.Struct, frozen=True, kw_only=True, tag="rewards_put"):
    """Samples got their rewards: finite."""

    rewards: tuple[RewardReady, ...]


class SampleDropped(msgspec.Struct, frozen=True, kw_only=True, tag="sample_dropped"):
    """A sample will get no reward."""

    group_id: GroupId
    sample_index: SampleIndex
    detail: str


class GroupDropped(msgspec.Struct, frozen=True, kw_only=True, tag="group_dropped"):
    """A group will never be trained; it may not even have been submitted."""

    group: DroppedGroup


class BatchLeased(msgspec.Struct, frozen=True, kw_only=True, tag="batch_leased"):
    """The trainer took a batch, or the first groups of one."""

    lease_id: LeaseId
    holder: Holder
    group_ids: tuple[GroupId, ...]  # none: the step is skipped
    version: PolicyVersion
    since_s: float
    until_s: float
    sampling: BatchSampling = BatchSampling()
    is_whole: bool = True  # no group follows


class BatchExtended(msgspec.Struct, frozen=True, kw_only=True, tag="batch_extended"):
    """The trainer took further groups of its batch, or time to wait for them."""

    lease_id: LeaseId
    group_ids: tuple[GroupId, ...]
    until_s: float
    sampling: BatchSampling
    is_whole: bool


class BatchAcked(msgspec.Struct, frozen=True, kw_only=True, tag="batch_acked"):
    """The trainer trained on a batch and published."""

    trained: BatchTrained


class Published(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    """A policy version can be sampled from."""

    version: PolicyVersion


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="lease_ended"):
    """A lease was taken back; what was not finished under it can be leased again."""

    lease_id: LeaseId
    failed: bool  # it counts as an attempt


class Fenced(msgspec.Struct, frozen=True, kw_only=True, tag="fenced"):
    """Incarnations of `name` below `incarnation` are not listened to any more."""

    name: str
    incarnation: int


class Rewound(msgspec.Struct, frozen=True, kw_only=True, tag="rewound"):
    """The trainer came back from a checkpoint: what it has not trained is sampled anew."""

    trained: TrainedSet
    version: PolicyVersion


class EvalReported(msgspec.Struct, frozen=True, kw_only=True, tag="eval_reported"):
    """The result of an evaluation prompt was handed out."""

    group_id: GroupId


class ChunkPut(msgspec.Struct, frozen=True, kw_only=True, tag="chunk_put"):
    """A rollout has sampled so much of a sample; the chunk before is not needed any more."""

    chunk: SampleChunk


class PartialsEnded(msgspec.Struct, frozen=True, kw_only=True, tag="partials_ended"):
    """A group was not sampled in time: some samples end with the tokens of their chunks."""

    group_id: GroupId
    rows: tuple[SampleIndex, ...]
    group_until_s: float  # when all of it must be scored


Event = (
    Submitted
    | StreamEnded
    | PromptLeased
    | SamplesPut
    | RewardLeased
    | RewardsPut
    | SampleDropped
    | GroupDropped
    | BatchLeased
    | BatchExtended
    | BatchAcked
    | Published
    | LeaseEnded
    | Fenced
    | Rewound
    | EvalReported
    | ChunkPut
    | PartialsEnded
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Event])


def encode_events(events: Sequence[Event]) -> bytes:
    """Return the MessagePack bytes of some events; a lone surrogate in a text becomes U+FFFD."""
    try:
        return _ENCODER.encode(events)
    except UnicodeEncodeError:  # out of a dataset row or an error's text; no reason to stop a run
        return _ENCODER.encode(_utf8(msgspec.to_builtins(events)))


def decode_events(data: bytes) -> list[Event]:
    """Return the events in MessagePack bytes.

    Raises:
        msgspec.ValidationError: the bytes are MessagePack but not events.
        msgspec.DecodeError: the bytes are not MessagePack.
    """
    return _DECODER.decode(data)


def _utf8(value: object) -> object:
    """Replace what UTF-8 cannot say in every text of plain data."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_utf8(key): _utf8(each) for key, each in value.items()}
    return [_utf8(each) for each in value] if isinstance(value, (list, tuple)) else value
