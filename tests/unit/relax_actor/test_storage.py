"""Rows come out of shared memory as they went in, and only where they are."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relax_actor.ids import Holder
from relax_actor.protocol import FinishReason, PromptGroup, SampleReady, TensorRef
from relax_actor.transfer_queue.storage import RowReader, RowRefError, RowWriter, renamed, segments_of
from transport.shm import SegmentMissingError, SegmentSpaceError, ShmSpace


@pytest.fixture
def space(tmp_path):
    return ShmSpace("0a1b2c3d", tmp_path)


@pytest.fixture
def writer(space):
    return RowWriter(space, Holder("rollout/0", 2))


def row(n):
    return {"tokens": np.arange(n, dtype=np.int32), "logprobs": np.full(n, -0.5, np.float32)}


def sample_ready(tensor):
    return SampleReady(
        group_id=3,
        sample_index=0,
        lease_id=1,
        tokens=tensor,
        logprobs=tensor,
        versions=msgspec.structs.replace(tensor, segment="other"),
        oldest_version=0,
        newest_version=0,
        finish_reason=FinishReason.STOP,
    )


def rows_in(space):
    """The names of what was written, without the arenas that it lies in."""
    return [name for name in space.names() if "-rows" in name]


def test_all_rows_of_a_put_share_one_segment(space, writer):
    refs = writer.write([row(5), row(9), row(1)])
    assert {ref.segment for row_refs in refs for ref in row_refs.values()} == set(rows_in(space))
    assert len(rows_in(space)) == 1
    assert all(ref.offset % 64 == 0 for row_refs in refs for ref in row_refs.values())
    reader = RowReader(space)
    assert reader.read(refs[1]["tokens"]).tolist() == list(range(9))
    assert reader.read(refs[2]["logprobs"]).tolist() == [-0.5]


def test_every_put_has_a_segment_name_of_its_own(space, writer):
    writer.write([row(1)])
    writer.write([row(1)])
    assert len(rows_in(space)) == 2
    assert set(space.names("rollout/0", 2)) == set(space.names())


def test_no_rows_need_no_segment(space, writer):
    assert writer.write([]) == []
    assert space.names() == []


def test_an_empty_array_is_an_array(space, writer):
    ((refs),) = writer.write([{"tokens": np.empty(0, np.int32)}])
    assert RowReader(space).read(refs["tokens"]).shape == (0,)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrays=st.lists(
        hnp.arrays(
            dtype=st.one_of(
                hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?"), hnp.boolean_dtypes()
            ),
            shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_array_comes_back_equal(arrays, space):
    space.sweep()
    rows = [{"plain": array, "turned": array.T} for array in arrays]
    refs = RowWriter(space, Holder("rollout/0", 1)).write(rows)
    reader = RowReader(space)
    for original, row_refs in zip(rows, refs, strict=True):
        for name, array in original.items():
            back = reader.read(row_refs[name])
            assert back.dtype == array.dtype.newbyteorder("=")
            assert back.shape == array.shape
            np.testing.assert_array_equal(back, array)


def test_a_row_is_read_only(space, writer):
    (refs,) = writer.write([row(3)])
    array = RowReader(space).read(refs["tokens"])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("bad", [np.array(["text"]), np.array([{}], dtype=object)])
def test_only_numbers_are_rows(space, writer, bad):
    with pytest.raises(ValueError, match="`tokens` is of dtype"):
        writer.write([{"tokens": bad}])
    assert space.names() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 1 << 30},
        {"offset": -4},
        {"shape": (10**9,)},
        {"shape": (2**33, 2**31)},
        {"shape": (-1,)},
        {"dtype": "int33"},
        {"dtype": "object"},
    ],
    ids=str,
)
def test_a_reference_beyond_its_segment_is_an_error_that_names_it(space, writer, wrong):
    (refs,) = writer.write([row(3)])
    ref = msgspec.structs.replace(refs["tokens"], **wrong)
    with pytest.raises(RowRefError, match=ref.segment) as caught:
        RowReader(space).read(ref)
    assert caught.value.ref == ref


def test_a_freed_row_is_missing(space, writer):
    (refs,) = writer.write([row(3)])
    space.sweep()
    with pytest.raises(SegmentMissingError):
        RowReader(space).read(refs["tokens"])


def test_a_view_outlives_its_segment_and_its_reader(space, writer):
    (refs,) = writer.write([row(3)])
    reader = RowReader(space)
    array = reader.read(refs["tokens"])
    space.sweep()
    reader.close()
    reader.close()
    assert array.tolist() == [0, 1, 2]


def test_memory_of_freed_rows_is_written_again(space, writer):
    """Puts whose rows are freed in time need no more memory than one arena."""
    for n in range(1, 200):
        (refs,) = writer.write([{"tokens": np.full(1000, n, np.int32)}])
        assert RowReader(space).read(refs["tokens"]).tolist() == [n] * 1000
        space.unlink(refs["tokens"].segment)
    assert len(space.names()) == 1


def test_a_view_that_lives_on_is_never_written_over(space, writer):
    reader = RowReader(space)
    (first,) = writer.write([{"tokens": np.full(1000, -1, np.int32)}])
    view = reader.read(first["tokens"])
    space.unlink(first["tokens"].segment)
    for n in range(200):
        (refs,) = writer.write([{"tokens": np.full(1000, n, np.int32)}])
        space.unlink(refs["tokens"].segment)
    assert view.tolist() == [-1] * 1000
    assert reader.read(first["tokens"]).tolist() == [-1] * 1000  # as long as the view lives, so does its row
    del view
    with pytest.raises(SegmentMissingError):
        reader.read(first["tokens"])


def test_reading_rows_again_and_again_maps_each_arena_once(space, writer):
    reader = RowReader(space)
    for n in range(64):
        (refs,) = writer.write([row(10 + n)])
        assert reader.read(refs["tokens"]).size == 10 + n
    assert len(reader._mappings) == len({(space.root / name).stat().st_ino for name in space.names()}) < 4


def open_descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def test_all_views_of_an_arena_share_one_lease(space, writer):
    """A batch of many puts costs one descriptor for each arena, not for each put."""
    refs = [writer.write([row(10)])[0] for _ in range(100)]
    reader = RowReader(space)
    before = open_descriptors()
    views = [reader.read(each["tokens"]) for each in refs]
    assert open_descriptors() - before < 8
    space.unlink(refs[0]["tokens"].segment)
    assert all(view.tolist() == list(range(10)) for view in views)


def test_mappings_of_a_dead_producer_are_given_up(space):
    reader = RowReader(space)
    for incarnation in (1, 2, 3):
        (refs,) = RowWriter(space, Holder("rollout/0", incarnation)).write([row(3)])
        reader.read(refs["tokens"])
        space.sweep("rollout/0", incarnation)
    assert len(reader._mappings) == 1


def test_rows_that_were_adopted_outlive_their_producer(space, writer):
    """The death of a producer takes its arenas and what nobody took over; the rest stays as it is."""
    (kept,), (lost,) = writer.write([row(3)]), writer.write([row(4)])
    name = space.adopt(kept["tokens"].segment, "rows", 1)
    space.sweep("rollout/0", 2)
    assert space.names() == [name]
    assert RowReader(space).read(renamed(kept["tokens"], kept["tokens"].segment, name)).tolist() == [0, 1, 2]
    with pytest.raises(SegmentMissingError):
        RowReader(space).read(lost["tokens"])


def test_a_row_freed_just_before_its_lease_is_missing(space, writer, monkeypatch):
    (refs,) = writer.write([row(3)])
    reader = RowReader(space)
    lease = reader._mappings.lease

    def leased_too_late(name):
        segment = lease(name)
        space.unlink(name)
        return segment

    monkeypatch.setattr(reader._mappings, "lease", leased_too_late)
    with pytest.raises(SegmentMissingError):
        reader.read(refs["tokens"])


def test_a_row_whose_memory_is_just_taken_again_is_missing(space, writer):
    (refs,) = writer.write([row(3)])
    lock = space.try_lock(refs["tokens"].segment)
    with pytest.raises(SegmentMissingError):
        RowReader(space).read(refs["tokens"])
    lock.close()


def test_an_adopted_row_is_found_under_its_new_name(space, writer):
    (refs,) = writer.write([row(3)])
    old = refs["tokens"].segment
    new = space.adopt(old, "queue", 1)
    assert RowReader(space).read(renamed(refs["tokens"], old, new)).tolist() == [0, 1, 2]


def test_only_the_renamed_segment_changes_its_name():
    tensor = TensorRef(segment="old", offset=64, dtype="int32", shape=(3,))
    sample = sample_ready(tensor)
    new = renamed(sample, "old", "new")
    assert (new.tokens.segment, new.logprobs.segment, new.versions.segment) == ("new", "new", "other")
    assert msgspec.structs.replace(new, tokens=tensor, logprobs=tensor) == sample
    assert renamed(sample, "unknown", "new") is sample
    assert renamed(tensor, "unknown", "new") is tensor


def test_the_segments_of_a_record_are_known():
    tensor = TensorRef(segment="a", offset=0, dtype="int32", shape=(3,))
    assert segments_of(sample_ready(tensor)) == {"a", "other"}
    assert segments_of(tensor) == {"a"}
    prompt = PromptGroup(group_id=0, tokens=tensor, samples=1, label="", origin="data.jsonl:1")
    assert segments_of(prompt) == {"a"}


def test_references_within_a_dict_are_found_and_renamed():
    tensor = TensorRef(segment="a", offset=0, dtype="int32", shape=(3,))
    image = msgspec.structs.replace(tensor, segment="b")
    prompt = PromptGroup(
        group_id=0,
        tokens=tensor,
        samples=1,
        label="",
        origin="data.jsonl:1",
        extra={"kept": 1},
        media={"pixel_values": image, "image_grid_thw": tensor},
    )
    assert segments_of(prompt) == {"a", "b"}
    moved = renamed(prompt, "b", "c")
    assert moved.media["pixel_values"] == msgspec.structs.replace(image, segment="c")
    assert moved.media["image_grid_thw"] == moved.tokens == tensor
    assert moved.extra == {"kept": 1}
    assert segments_of(renamed(moved, "a", "c")) == {"c"}
    assert renamed(prompt, "z", "c") is prompt


def full_for(space, times, monkeypatch):
    """Refuse memory a number of times, then give it."""
    create, refused = space.create, []

    def create_later(owner, incarnation, label, nbytes):
        if len(refused) < times:
            refused.append(label)
            raise SegmentSpaceError(label, space.root, nbytes, 0)
        return create(owner, incarnation, label, nbytes)

    monkeypatch.setattr(space, "create", create_later)


def test_rows_wait_for_memory_and_say_so_once(space, monkeypatch):
    """What was generated is not lost because memory is full for a moment."""
    full_for(space, 6, monkeypatch)
    told = []
    writer = RowWriter(space, Holder("rollout/0", 1), on_full=told.append, patience_s=60.0)
    (refs,) = writer.write([row(3)])
    assert RowReader(space).read(refs["tokens"]).tolist() == [0, 1, 2]
    assert [type(error) for error in told] == [SegmentSpaceError]


def test_rows_do_not_wait_for_memory_for_ever(space, monkeypatch):
    full_for(space, 10**9, monkeypatch)
    with pytest.raises(SegmentSpaceError, match="--shm-size"):
        RowWriter(space, Holder("rollout/0", 1), patience_s=0.05).write([row(3)])
    assert space.names() == []
