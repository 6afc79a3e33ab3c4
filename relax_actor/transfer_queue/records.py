"""What the TransferQueue's ledger answers and remembers; what it decides is in `events`."""

from enum import StrEnum

import msgspec

from relax_actor.ids import GroupId, Holder, LeaseId, PolicyVersion, SampleIndex

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
