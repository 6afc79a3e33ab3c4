"""From a trainer's shards to a replica's: every byte, once, from somebody who has it."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sharded_models import HEAD, NUMPY, decoder, full_model, spec, tensor, trainer_shards

from relax_actor.dcs.reshard import Copy, DCSSyncError, _coalesced, plan_reshard
from relax_actor.dcs.reshard_arrays import assemble
from relax_actor.dcs.sharding import Sharding
from relax_actor.dcs.topology import Holders, ReplicaLayout, TrainerLayout


def replica_shard(described, array, index, replica, rank):
    tp = replica.tp
    match described.sharding:
        case Sharding.REPLICATED:
            return array
        case Sharding.ROW:
            return np.split(array, tp, axis=1)[rank]
        case Sharding.VOCAB:
            rows = next(
                n for n in range(len(array), 10**6) if n % tp == 0 and n % replica.vocab_multiple == 0
            )
            return array[rank * rows // tp : (rank + 1) * rows // tp]
        case Sharding.QKV if index and described.groups < tp:
            return np.split(array, described.groups)[rank * described.groups // tp]
    return np.split(array, tp)[rank]


def run(plan, shards):
    """Carry a plan out; the second half says how often each byte is written."""
    found, written = {}, {}
    for shard in plan.shards:
        target, count = np.zeros(shard.nbytes, np.uint8), np.zeros(shard.nbytes, np.uint8)
        assemble(shard, lambda rank, parameter: shards[rank, parameter], target)
        for copy in shard.copies:
            starts = copy.target_offset + np.arange(copy.rows)[:, None] * copy.target_pitch
            np.add.at(count, (starts + np.arange(copy.row_bytes)).reshape(-1), 1)
        found[shard.rank, shard.name] = target.view(NUMPY[shard.dtype]).reshape(shard.shape)
        written[shard.rank, shard.name] = count
    return found, written


def check(specs, layout, replica, mapping=None):
    weights = full_model(specs)
    plan = plan_reshard(specs, layout, replica, mapping)
    found, written = run(plan, trainer_shards(specs, weights, layout))
    assert all((count == 1).all() for count in written.values())
    assert set(found) == {(rank, name) for rank in range(replica.tp) for name in weights}
    for each in specs:
        for index, part in enumerate(each.tensors):
            for rank in range(replica.tp):
                expected = replica_shard(each, weights[part.name], index, replica, rank)
                assert found[rank, part.name].shape == expected.shape
                assert found[rank, part.name].tobytes() == expected.tobytes()
    return plan


@st.composite
def layouts(draw):
    sizes = {name: draw(st.sampled_from([1, 2, 4])) for name in ("tp", "dp", "cp", "ep", "etp")}
    order = draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-ep-cp-dp-pp", "cp-tp-dp-ep-pp"]))
    assume(sizes["tp"] * sizes["cp"] * sizes["dp"] % (sizes["ep"] * sizes["etp"]) == 0)
    return TrainerLayout(**sizes, pp=draw(st.sampled_from([1, 2])), order=order)


@settings(max_examples=60, deadline=None)
@given(
    layouts(),
    st.builds(ReplicaLayout, tp=st.sampled_from([1, 2, 4, 8]), vocab_multiple=st.sampled_from([1, 4, 64])),
    st.sampled_from(list(NUMPY)),
    st.sampled_from([0, 4]),
    st.integers(1, 16),
)
def test_any_layout_becomes_any_other_bit_for_bit(layout, replica, dtype, experts, vocab):
    specs = list(decoder(heads=8, groups=4, stages=layout.pp, experts=experts, vocab=vocab, dtype=dtype))

    check(specs, layout, replica)


def test_whole_tensors_come_from_one_copy_of_the_trainer_alone():
    plan = check(list(decoder(stages=2)), TrainerLayout(tp=2, pp=2, dp=3), ReplicaLayout())

    assert set(plan.sent_bytes()) == {0, 1, 6, 7}  # the first data parallel copy of each stage
    assert plan.of_rank(0) == plan.shards
    assert plan.of_rank(1) == ()


def test_a_trainer_of_one_rank_gives_each_tensor_in_one_copy_however_it_is_fused():
    plan = check(list(decoder(heads=8, groups=4)), TrainerLayout(), ReplicaLayout())

    assert {len(shard.copies) for shard in plan.shards} == {1}
    queries = next(shard for shard in plan.shards if shard.name == "layers.0.q")
    (copy,) = queries.copies
    row = 4 * 4
    assert (copy.rows, copy.row_bytes) == (4, 2 * HEAD * row)  # a run for each KV head
    assert (copy.source_pitch, copy.target_pitch) == (4 * HEAD * row, 2 * HEAD * row)


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(1, 3), st.integers(0, 2)), max_size=8))
def test_what_is_taken_together_is_what_was_there(runs):
    """Runs of any size, at any distance, from any source."""
    copies, at = [], 0
    for source, nbytes, gap in runs:
        place = {"source_offset": 100 - 5 * len(copies) if source else at, "target_offset": at}
        pitches = {"source_pitch": nbytes, "target_pitch": nbytes, "row_bytes": nbytes, "rows": 1}
        copies.append(Copy(source=source, parameter="w", **place, **pitches))
        at += nbytes + gap

    assert moved(_coalesced(copies)) == moved(copies)


def moved(copies):
    return {
        (copy.source, copy.source_offset + row * copy.source_pitch + byte): (
            copy.target_offset + row * copy.target_pitch + byte
        )
        for copy in copies
        for row in range(copy.rows)
        for byte in range(copy.row_bytes)
    }


def test_equal_layouts_need_one_copy_a_tensor():
    plan = check(
        list(decoder(heads=8, groups=4)), TrainerLayout(tp=4), ReplicaLayout(tp=4, vocab_multiple=16)
    )

    assert max(len(shard.copies) for shard in plan.shards) == 1
    assert all(
        copy.source == shard.rank or shard.name.endswith(("norm", "scale")) or shard.nbytes == 0
        for shard in plan.shards
        for copy in shard.copies
    )


def test_a_vocabulary_padded_by_the_trainer_arrives_without_padding():
    head = spec(Sharding.VOCAB, tensor("embed", 5, 2), padded_rows=12)

    plan = check([head], TrainerLayout(tp=4), ReplicaLayout(tp=2, vocab_multiple=1))

    assert [shard.shape for shard in plan.shards] == [(3, 2), (2, 2)]
    assert plan.sent_bytes() == {0: 3 * 8, 1: 2 * 8}  # ranks 2 and 3 have nothing but padding


def test_empty_tensors_need_no_copy():
    empty = [spec(Sharding.COLUMN, tensor("a", 0, 3)), spec(Sharding.ROW, tensor("b", 4, 0))]

    plan = check(empty, TrainerLayout(tp=2), ReplicaLayout(tp=2))

    assert [shard.copies for shard in plan.shards] == [()] * 4


@pytest.mark.parametrize("mapping", [{2: 0, 3: 1}, {2: [0], 3: [1]}, [(), (), 0, 1], {0: (), 2: 0, 3: 1}])
def test_a_rank_mapping_says_who_serves_whom(mapping):
    specs = list(decoder())

    plan = check(specs, TrainerLayout(tp=2, dp=2), ReplicaLayout(tp=2, vocab_multiple=16), mapping)

    for rank in (0, 1):
        sources = {copy.source for shard in plan.of_rank(rank) for copy in shard.copies}
        assert sources == {rank + 2}


def test_a_mapping_over_stages_serves_a_rank_from_each():
    mapping = {0: 0, 1: 1, 2: 0, 3: 1}

    check(list(decoder(stages=2)), TrainerLayout(tp=2, pp=2), ReplicaLayout(tp=2, vocab_multiple=16), mapping)


def test_a_mapping_over_experts_may_name_ranks_that_differ_in_experts_only():
    layout = TrainerLayout(dp=2, ep=2)

    check(list(decoder(experts=4)), layout, ReplicaLayout(tp=2), {0: [0, 1], 1: [0, 1]})


@pytest.mark.parametrize(
    ("mapping", "reason"),
    [
        ({0: 0}, "replica rank 1 is missing: no trainer rank serves it"),
        ({}, "replica rank 0 is missing: no trainer rank serves it"),
        ({0: 0, 1: 1, 4: 0}, "trainer rank 4 is out of range: there are 4"),
        ({0: 0, -1: 1}, "trainer rank -1 is out of range: there are 4"),
        ([0, 2], "replica rank 2 is out of range: there are 2"),
        ({0: 0, 1: 1, 2: 0}, "replica rank 0 is served the same shards twice, by trainer ranks 0 and 2"),
        ({0: [0, 0], 1: 1}, "replica rank 0 is served the same shards twice, by trainer ranks 0 and 0"),
        ([0, 1, 1, 1], "replica rank 1 is served the same shards twice, by trainer ranks 1 and 3"),
    ],
)
def test_what_is_wrong_with_a_rank_mapping_is_named(mapping, reason):
    with pytest.raises(DCSSyncError) as caught:
        plan_reshard(decoder(), TrainerLayout(tp=2, dp=2), ReplicaLayout(tp=2), mapping)

    assert caught.value.reason == reason
    assert caught.value.tensor is None
    assert str(caught.value).startswith(f"the rank mapping cannot be used: {reason}\n  trainer: ")
    assert str(caught.value).endswith(
        "\n\nhint: without a rank mapping every trainer rank serves every replica rank"
    )


def test_an_error_shows_both_layouts_and_the_first_tensor_that_cannot_be_mapped():
    layout, replica = TrainerLayout(tp=2, pp=2), ReplicaLayout(tp=2, vocab_multiple=16)

    with pytest.raises(DCSSyncError) as caught:
        plan_reshard(decoder(stages=2), layout, replica, {0: 0, 1: 1, 2: 1, 3: 0})

    first, *rest = str(caught.value).splitlines()
    assert first == (
        "`layers.1.q`, float32 [8, 4], cannot be mapped: "
        "no trainer rank that serves replica rank 0 holds rows 0 to 3, bytes 0 to 15 of each"
    )
    assert rest == [
        "  trainer: tp 2, cp 1, ep 1, dp 1, pp 2, etp 2, order tp-cp-ep-dp-pp",
        "    rank 0: tp 0, pp 0, cp 0, dp 0; experts: tp 0, ep 0",
        "    rank 1: tp 1, pp 0, cp 0, dp 0; experts: tp 1, ep 0",
        "    rank 2: tp 0, pp 1, cp 0, dp 0; experts: tp 0, ep 0",
        "    rank 3: tp 1, pp 1, cp 0, dp 0; experts: tp 1, ep 0",
        "  replica: tp 2",
        "    rank 0: served by trainer ranks 0, 3",
        "    rank 1: served by trainer ranks 1, 2",
    ]


def test_an_error_about_hundreds_of_ranks_stays_readable():
    with pytest.raises(DCSSyncError) as caught:
        plan_reshard([spec(Sharding.ROW, tensor("bias", 4))], TrainerLayout(dp=512), ReplicaLayout(tp=32))

    lines = str(caught.value).splitlines()
    assert "    and 496 more" in lines
    assert "    and 16 more" in lines
    assert len(lines) == 1 + 1 + 17 + 1 + 17
    assert max(map(len, lines)) < 120


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (spec(Sharding.COLUMN, tensor("w", 6, 2)), "6 rows cannot be cut into 4 equal parts"),
        (spec(Sharding.ROW, tensor("w", 4, 6)), "6 columns cannot be cut into 4 equal parts"),
        (spec(Sharding.ROW, tensor("w", 4)), "it has no dimension 1 to be cut along"),
        (spec(Sharding.VOCAB, tensor("w", 9, 1)), "9 padded rows cannot be cut into 4 equal parts"),
        (
            spec(Sharding.VOCAB, tensor("w", 9, 1), padded_rows=8),
            "padded to 8 rows, which are fewer than it has",
        ),
        (
            spec(Sharding.QKV, *(tensor(x, 8, 1) for x in ("w", "k", "v")), groups=2),
            "2 KV heads cannot be cut into 4 equal parts",
        ),
        (
            spec(Sharding.QKV, *(tensor(x, 10, 1) for x in ("w", "k", "v")), groups=4),
            "10 rows over KV heads cannot be cut into 4 equal parts",
        ),
        (spec(Sharding.COLUMN, tensor("w", 4), stage=1), "it is of stage 1, and the stages are 1"),
        (
            spec(Sharding.COLUMN, tensor("w", 4), expert=3, experts=3),
            "expert 3 of 3 has no place in 1 expert parallel ranks",
        ),
    ],
)
def test_what_the_trainer_cannot_have_is_named(described, reason):
    with pytest.raises(DCSSyncError) as caught:
        plan_reshard([described], TrainerLayout(tp=4), ReplicaLayout())

    assert (caught.value.tensor.name in "wkv", caught.value.reason) == (True, reason)


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (
            spec(Sharding.QKV, *(tensor(x, 6, 1) for x in ("w", "k", "v")), groups=2),
            "2 heads cannot be cut into 3 equal parts",
        ),
        (spec(Sharding.COLUMN, tensor("w", 8, 2)), "8 rows cannot be cut into 3 equal parts"),
        (spec(Sharding.ROW, tensor("w", 2, 8)), "8 columns cannot be cut into 3 equal parts"),
        (
            spec(Sharding.QKV, *(tensor(x, 8, 1) for x in ("w", "k", "v")), groups=4),
            "4 heads cannot be cut into 3 equal parts",
        ),
    ],
)
def test_what_the_replica_cannot_want_is_named(described, reason):
    with pytest.raises(DCSSyncError) as caught:
        plan_reshard([described], TrainerLayout(tp=2), ReplicaLayout(tp=3))

    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"order": "tp-pp"}, "must name tp, cp, ep, dp, pp once each"),
        ({"tp": 0}, "at least 1"),
        ({"ep": 2}, "must divide tp x cp x dp"),
        ({"tp": 2, "dp": 2, "pp": 2, "etp": 1, "order": "tp-pp-dp-cp-ep"}, "other stages than the rest"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, reason):
    with pytest.raises(ValueError, match=reason):
        TrainerLayout(**sizes)


def test_a_replica_without_ranks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ReplicaLayout(tp=0)


def test_a_fused_parameter_needs_all_its_tensors():
    with pytest.raises(ValueError, match="qkv is made of 3 tensors"):
        spec(Sharding.QKV, tensor("q", 2))


def test_ranks_are_numbered_as_megatron_numbers_them():
    """Of the example in its documentation: 16 ranks, tp 2, pp 4, dp 2; and experts over dp."""
    layout = TrainerLayout(tp=2, pp=4, dp=2, ep=2)

    assert [rank for rank in range(16) if layout.dense(rank)["pp"] == 0] == [0, 1, 2, 3]
    assert [
        rank for rank in range(16) if layout.dense(rank) == layout.dense(6) | {"dp": layout.dense(rank)["dp"]}
    ] == [4, 6]
    assert [layout.expert(rank)["ep"] for rank in range(4)] == [0, 0, 1, 1]
    assert Holders(layout, ReplicaLayout()).find((1, 0, 1), 0) == 6


def test_a_plan_of_a_large_mixture_of_experts_is_quick():
    """Thousands of tensors a layout; the bound is generous, the plan is made once a run."""
    specs = [
        spec(
            Sharding.GATE_UP,
            *(tensor(f"{layer}.{e}.{x}", 768, 2048) for x in ("gate", "up")),
            expert=e,
            experts=128,
        )
        for layer in range(8)
        for e in range(128)
    ]

    plan = plan_reshard(specs, TrainerLayout(tp=2, dp=4, ep=8, etp=1), ReplicaLayout(tp=4))

    assert len(plan.shards) == 8 * 128 * 2 * 4
    assert {len(shard.copies) for shard in plan.shards} == {1}
