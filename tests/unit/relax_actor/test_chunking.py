"""When a chunk is due, and what a lease's chunks are read as."""

import numpy as np
import pytest

from relax_actor.engines.base import NO_PREFIX, Completion, Request, SamplingParams
from relax_actor.errors import RoutedExpertsError
from relax_actor.ids import Holder
from relax_actor.protocol import FinishReason, PromptGroup, PromptLease, TensorRef
from relax_actor.rl.routing import DENSE, RouteLayout
from relax_actor.roles.chunking import Chunks, prefixes, sample_chunk, write_rows
from relax_actor.transfer_queue.storage import RowReader, RowWriter
from transport.shm import SegmentMissingError, ShmSpace

A, B = (0, 0), (0, 1)


def test_chunks_are_due_at_multiples_of_their_size():
    chunks = Chunks(4)
    due = [chunks.due({A: length, B: length - 2}) for length in range(2, 12)]
    assert due == [[], [], [A], [], [B], [], [A], [], [B], []]


def test_a_continued_sample_is_due_at_the_same_lengths():
    chunks = Chunks(4)
    assert [chunks.due({A: length}) for length in (8, 9, 12)] == [[A], [], [A]]


def test_a_sample_that_has_grown_by_several_chunks_is_written_once():
    chunks = Chunks(2)
    assert [chunks.due({A: length}) for length in (7, 7, 8)] == [[A], [], [A]]


def test_no_chunk_is_due_where_none_is_wanted():
    assert Chunks(0).due({A: 100}) == []


def test_what_is_not_in_flight_any_more_is_forgotten():
    chunks = Chunks(2)
    chunks.due({A: 2})
    chunks.due({})
    assert chunks.due({A: 2}) == [A]


@pytest.fixture
def space(tmp_path):
    return ShmSpace("ab12cd34", str(tmp_path))


def completion(sample, tokens, **fields):
    request = Request(group_id=7, sample_index=sample, prompt=(1,), params=SamplingParams(max_new_tokens=9))
    return Completion(
        request=request,
        tokens=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32) / 3,
        versions=np.array([3] + [5] * (len(tokens) - 1), np.int32),
        finish_reason=FinishReason.ABORT,
        **fields,
    )


def lease(chunks):
    tokens = TensorRef(segment="prompt", offset=0, dtype="int32", shape=(1,))
    group = PromptGroup(group_id=7, tokens=tokens, samples=3, label="", origin="")
    return PromptLease(lease_id=2, group=group, missing=(0, 2), policy_version=5, chunks=tuple(chunks))


def test_a_lease_is_read_as_the_prefixes_of_its_samples(space):
    writer = RowWriter(space, Holder("rollout/0", 1))
    cut = completion(2, [8, 9, 10])
    (row,) = write_rows(writer, [cut])
    chunk = sample_chunk(cut, row, 1)
    assert (chunk.length, chunk.oldest_version, chunk.newest_version) == (3, 3, 5)

    found = prefixes(lease([chunk]), RowReader(space))
    assert found[0] is NO_PREFIX
    assert (found[2].tokens, found[2].versions) == ((8, 9, 10), (3, 5, 5))
    assert np.array(found[2].logprobs, np.float32).tobytes() == cut.logprobs.tobytes()


def test_a_chunk_that_was_freed_cannot_be_gone_on_from(space):
    writer = RowWriter(space, Holder("rollout/0", 1))
    cut = completion(2, [8])
    (row,) = write_rows(writer, [cut])
    space.unlink(row["tokens"].segment)
    with pytest.raises(SegmentMissingError):
        prefixes(lease([sample_chunk(cut, row, 1)]), RowReader(space))


LAYOUT = RouteLayout(experts=8, top_k=2, layers=3, moe_layers=(0, 2))


def routes_of(tokens, seed=0):
    found = np.random.default_rng(seed).integers(0, 8, (tokens, 3, 2), dtype=np.int32)
    found[:, 1] = DENSE
    return found


def test_routed_experts_go_through_a_chunk_into_the_prefix(space):
    """The prompt has one token: as many rows as there are response tokens."""
    cut = completion(2, [8, 9, 10], routed_experts=routes_of(3))
    (row,) = write_rows(RowWriter(space, Holder("rollout/0", 1)), [cut], LAYOUT)
    assert (row["routed_experts"].dtype, row["routed_experts"].shape) == ("uint8", (3, 2, 2))
    chunk = sample_chunk(cut, row, 1)
    found = prefixes(lease([chunk]), RowReader(space), LAYOUT)
    assert found[0] is NO_PREFIX
    assert found[2].routed_experts.dtype == np.int32
    assert (found[2].routed_experts == routes_of(3)).all()
    assert prefixes(lease([chunk]), RowReader(space))[2].routed_experts is None


def test_without_a_layout_no_routes_are_written(space):
    (row,) = write_rows(RowWriter(space, Holder("rollout/0", 1)), [completion(2, [8])])
    assert sample_chunk(completion(2, [8]), row, 1).routed_experts is None


@pytest.mark.parametrize(
    ("routes", "fact"),
    [
        (None, "were not recorded"),
        (routes_of(2), "are of 2 tokens; 1 prompt and 3 response tokens have 3"),
        (routes_of(4), "are of 4 tokens"),
        (routes_of(3)[:, :2], "have shape"),
        (routes_of(3) + 8, "name expert"),
    ],
)
def test_routes_that_cannot_be_a_samples_own_are_not_written(space, routes, fact):
    wrong = completion(2, [8, 9, 10], routed_experts=routes)
    with pytest.raises(RoutedExpertsError, match=f"sample 2 of group 7 .*{fact}"):
        write_rows(RowWriter(space, Holder("rollout/0", 1)), [wrong], LAYOUT)
    assert not [name for name in space.names() if "-rows" in name]
