"""What a rollout hands to the queue while it samples, and takes from it to go on with what another began."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.engines.base import NO_PREFIX, Completion, Prefix
from relax_actor.errors import RoutedExpertsError
from relax_actor.ids import GroupId, LeaseId, PolicyVersion, SampleIndex
from relax_actor.protocol import PromptLease, SampleChunk, SampleReady, TensorRef
from relax_actor.rl import routing
from relax_actor.rl.routing import RouteLayout
from relax_actor.roles.rows import Rows

Key = tuple[GroupId, SampleIndex]


class Chunks:
    """Knows which samples have grown by a chunk since they were last written.

    Args:
        every_tokens: how many tokens make a chunk; 0 makes none.
    """

    def __init__(self, every_tokens: int) -> None:
        self._every_tokens = every_tokens
        self._next: dict[Key, int] = {}

    def due(self, lengths: Mapping[Key, int]) -> list[Key]:
        """Return the samples to be written now.

        Args:
            lengths: the response tokens of all samples in flight; others are forgotten.
        """
        if not self._every_tokens:
            return []
        self._next = {key: self._next.get(key, self._after(0)) for key in lengths}
        found = [key for key, length in lengths.items() if length >= self._next[key]]
        self._next.update({key: self._after(lengths[key]) for key in found})
        return found

    def _after(self, length: int) -> int:
        """Return the next length at which a chunk ends: the same on every replica."""
        return (length // self._every_tokens + 1) * self._every_tokens


def prefixes(lease: PromptLease, rows: Rows, layout: RouteLayout | None = None) -> dict[SampleIndex, Prefix]:
    """Read what is there of a lease's samples; those without anything have an empty one.

    Args:
        lease: what is to be gone on with.
        rows: of this rollout.
        layout: of the routed experts; None reads none.

    Raises:
        SegmentMissingError: a chunk was freed, so the lease has ended.
    """
    found = dict.fromkeys(lease.missing, NO_PREFIX)
    for chunk in lease.chunks:
        found[chunk.sample_index] = Prefix(
            tokens=tuple(rows.read(chunk.tokens).tolist()),
            logprobs=tuple(rows.read(chunk.logprobs).tolist()),
            versions=tuple(rows.read(chunk.versions).tolist()),
            routed_experts=_routes(chunk, rows, layout),
        )
    return found


def write_rows(
    rows: Rows, completions: Sequence[Completion], layout: RouteLayout | None = None
) -> list[dict[str, TensorRef]]:
    """Write tokens, log-probs and versions of finished or unfinished samples; return where they are.

    Args:
        rows: of this rollout.
        completions: each of at least one token.
        layout: of the routed experts, which are written too; None writes none.

    Raises:
        RoutedExpertsError: the engine has recorded none, or others than the model can have.
    """
    return rows.write([_arrays(each, layout) for each in completions])


def sample_chunk(completion: Completion, row: Mapping[str, TensorRef], lease_id: LeaseId) -> SampleChunk:
    """Say where the tokens so far of a sample are."""
    return SampleChunk(**_written(completion, row, lease_id))


def sample_ready(completion: Completion, row: Mapping[str, TensorRef], lease_id: LeaseId) -> SampleReady:
    """Say where a finished sample is."""
    return SampleReady(
        **_written(completion, row, lease_id),
        finish_reason=completion.finish_reason,
        continued_tokens=len(completion.request.prefix.tokens),
    )


def _written(completion: Completion, row: Mapping[str, TensorRef], lease_id: LeaseId) -> dict[str, Any]:
    """Return what is said of a sample, finished or not: `row` has the names of the fields."""
    oldest, newest = version_span(completion.versions)
    return {
        "group_id": completion.request.group_id,
        "sample_index": completion.request.sample_index,
        "lease_id": lease_id,
        "oldest_version": oldest,
        "newest_version": newest,
        **row,
    }


def version_span(versions: npt.NDArray[np.int32]) -> tuple[PolicyVersion, PolicyVersion]:
    """Return the oldest and the newest version of a sample's tokens, of which there is at least one."""
    return PolicyVersion(int(versions.min())), PolicyVersion(int(versions.max()))


def _arrays(completion: Completion, layout: RouteLayout | None) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
    }
    return arrays if layout is None else arrays | {"routed_experts": _packed(completion, layout)}


def _packed(completion: Completion, layout: RouteLayout) -> npt.NDArray[Any]:
    request, routes = completion.request, completion.routed_experts
    if routes is None:
        raise RoutedExpertsError(request.key, "were not recorded by the engine")
    routing.check_length(routes, len(request.prompt), len(completion.tokens), request.key)
    return routing.pack(routes, layout, request.key)


def _routes(chunk: SampleChunk, rows: Rows, layout: RouteLayout | None) -> npt.NDArray[np.int32] | None:
    if layout is None or chunk.routed_experts is None:
        return None
    return routing.unpack(rows.read(chunk.routed_experts), layout)
