"""What the TransferQueue's ledger decides: small, immutable, serialisable facts.

Every decision of the ledger is a list of events. An event states a fact in the past and holds all that is
needed to apply it again, so that a journal of events is the ledger (see `ledger` and `journal`).
"""

from collections.abc import Sequence

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
from relax_actor.transfer_queue.records import (
    DroppedGroup,
    RowKey,
    TrainedSet,
)


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
