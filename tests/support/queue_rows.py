"""What prompts and rollouts put into the queue, made without them."""

from typing import Any

from relax_actor.protocol import FinishReason, PromptGroup, PromptLease, SampleChunk, SampleReady, TensorRef


def ref(segment: str, length: int = 1) -> TensorRef:
    """Return a reference to memory that need not be there."""
    return TensorRef(segment=segment, offset=0, dtype="int32", shape=(length,))


def prompt(group_id: int, tokens: TensorRef, samples: int, **fields: Any) -> PromptGroup:
    """Return a prompt."""
    return PromptGroup(
        **{"group_id": group_id, "tokens": tokens, "samples": samples, "label": "4", "origin": "x:1"} | fields
    )


def sample_of(lease: PromptLease, index: int, tensor: TensorRef | None = None, **fields: Any) -> SampleReady:
    """Return a finished sample of the lease's version; all of its arrays are `tensor`."""
    return SampleReady(finish_reason=FinishReason.STOP, **_put(lease, index, tensor, fields))


def chunk_of(lease: PromptLease, index: int, tensor: TensorRef | None = None, **fields: Any) -> SampleChunk:
    """Return what there is of an unfinished sample."""
    return SampleChunk(**_put(lease, index, tensor, fields))


def _put(lease: PromptLease, index: int, tensor: TensorRef | None, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "group_id": lease.group.group_id,
        "sample_index": index,
        "lease_id": lease.lease_id,
        "tokens": tensor,
        "logprobs": tensor,
        "versions": tensor,
        "oldest_version": lease.policy_version,
        "newest_version": lease.policy_version,
        **fields,
    }
