"""A queue that soon gives up, and what a caller of it needs to put samples."""

from relax_actor.ids import Holder
from relax_actor.protocol import FinishReason, PromptGroup, PromptLease, SampleReady
from relax_actor.roles.queue import TransferQueue

HOLDER = Holder("rollout/0", 1)


class ImpatientQueue(TransferQueue):
    """Gives up before a test does."""

    full_s = 0.5


def prompt(group_id, tokens, samples):
    return PromptGroup(group_id=group_id, tokens=tokens, samples=samples, label="4", origin="rows:1")


def sample(lease: PromptLease, index, tokens):
    return SampleReady(
        group_id=lease.group.group_id,
        sample_index=index,
        lease_id=lease.lease_id,
        tokens=tokens,
        logprobs=tokens,
        versions=tokens,
        oldest_version=lease.policy_version,
        newest_version=lease.policy_version,
        finish_reason=FinishReason.STOP,
    )
