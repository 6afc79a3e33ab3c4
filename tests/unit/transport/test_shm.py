"""Named shared memory: owners, leases, sweeps, and no SIGBUS."""

import gc
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from descriptors import descriptors_below
from hypothesis import given
from hypothesis import strategies as st
from watching import eventually

from transport.shm import (
    SegmentBusyError,
    SegmentExistsError,
    SegmentMissingError,
    SegmentName,
    SegmentNameError,
    SegmentSpaceError,
    ShmSpace,
    other_runs,
    parse_name,
)

WORD = st.text("abcXYZ019_", min_size=1, max_size=8)
OWNER = st.lists(st.text("abcXYZ019_-", min_size=1, max_size=6), min_size=1, max_size=3).map("/".join)
LABEL = st.text("abcXYZ019_.-", min_size=1, max_size=12)


@pytest.fixture
def space(tmp_path):
    return ShmSpace("0badcafe", tmp_path)


@given(WORD, OWNER, st.integers(0, 10**9), LABEL)
def test_a_name_says_who_owns_the_segment(run_id, owner, incarnation, label):
    name = ShmSpace(run_id).name(owner, incarnation, label)

    assert parse_name(name) == SegmentName(run_id, owner, incarnation, label)
    assert str(parse_name(name)) == name


def test_the_name_is_readable(space):
    assert space.create("rollout/3", 2, "g17", 1).name == "rx-0badcafe-rollout~3.2-g17"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "rx-",
        "rx-run-a.1",
        "rx-run-a.01-x",
        "rx-run-a.-1-x",
        "rx-run-a.1-",
        "psm_1234",
        "rx-run-a.1-x/y",
        "rx-run-a.1-x\n",
    ],
)
def test_a_foreign_name_is_refused(name):
    with pytest.raises(SegmentNameError) as caught:
        parse_name(name)

    assert caught.value.value == name


@pytest.mark.parametrize("run_id", ["", "a-b", "a/b", "a.b", "..", "a\n"])
def test_a_run_id_that_could_reach_another_run_is_refused(tmp_path, run_id):
    with pytest.raises(SegmentNameError):
        ShmSpace(run_id, tmp_path)


@pytest.mark.parametrize(
    ("owner", "incarnation", "label"),
    [
        ("", 1, "x"),
        ("a.b", 1, "x"),
        ("a~b", 1, "x"),
        ("/a", 1, "x"),
        ("a//b", 1, "x"),
        ("../a", 1, "x"),
        ("a", -1, "x"),
        ("a", 1, ""),
        ("a", 1, "x/y"),
        ("a", 1, "x@y"),
        ("a", 1, "x" * 300),
    ],
)
def test_a_part_that_would_not_come_back_out_of_the_name_is_refused(space, owner, incarnation, label):
    with pytest.raises(SegmentNameError):
        space.create(owner, incarnation, label, 1)

    assert space.names() == []


def test_what_one_writes_the_other_reads(space):
    with space.create("rollout/0", 1, "g", 64) as mine:
        mine.ndarray(np.int32, (2, 3), 8)[:] = np.arange(6).reshape(2, 3)
        with space.attach(mine.name) as theirs:
            assert theirs.nbytes == 64
            assert theirs.ndarray(np.int32, (2, 3), 8).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_new_segment_is_zeros_and_private_to_the_user(space, tmp_path):
    segment = space.create("a", 1, "x", 5000)

    assert bytes(segment.buf) == bytes(5000)
    assert stat.S_IMODE((tmp_path / segment.name).stat().st_mode) == 0o600


def test_attached_memory_is_read_only_unless_asked_otherwise(space):
    name = space.create("a", 1, "x", 8).name

    with pytest.raises(TypeError):
        space.attach(name).buf[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        space.attach(name).ndarray(np.uint8, (8,))[0] = 1
    space.attach(name, writable=True).buf[0] = 1

    assert space.attach(name).buf[0] == 1


def test_a_view_beyond_the_segment_is_refused(space):
    segment = space.create("a", 1, "x", 64)

    for dtype, shape, offset in [
        (np.uint8, (65,), 0),
        (np.int64, (8,), 8),
        (np.uint8, (1,), -1),
        (np.uint8, (1,), 64),
    ]:
        with pytest.raises(ValueError, match="not within"):
            segment.ndarray(dtype, shape, offset)


def test_views_outlive_close(space):
    segment = space.create("a", 1, "x", 64)
    view = segment.ndarray(np.uint8, (64,))
    view[:] = 7

    segment.close()
    segment.close()
    space.unlink(segment.name)

    assert view.sum() == 64 * 7


def test_a_closed_segment_has_no_bytes(space):
    segment = space.create("a", 1, "x", 64)
    segment.close()

    with pytest.raises(ValueError, match="closed"):
        _ = segment.buf
    with pytest.raises(ValueError, match="closed"):
        _ = segment.file_bytes


def test_closing_gives_the_descriptor_back(space):
    for index in range(20):
        with space.create("a", 1, f"x{index}", 64) as segment:
            view = segment.ndarray(np.uint8, (4,))
            assert descriptors_below(space.root)
    del view, segment
    gc.collect()

    assert descriptors_below(space.root) == []


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_segment_is_refused(space, nbytes):
    with pytest.raises(ValueError, match="at least one byte"):
        space.create("a", 1, "x", nbytes)


def test_a_name_is_never_taken_over(space):
    space.create("a", 1, "x", 8).buf[0] = 1

    with pytest.raises(SegmentExistsError) as caught:
        space.create("a", 1, "x", 8)

    assert caught.value.name == "rx-0badcafe-a.1-x"
    assert space.attach(caught.value.name).buf[0] == 1


def test_a_missing_segment_is_named(space):
    with pytest.raises(SegmentMissingError, match=r"rx-0badcafe-a\.1-x"):
        space.attach("rx-0badcafe-a.1-x")


def test_a_segment_still_without_bytes_is_missing(space, tmp_path):
    (tmp_path / "rx-0badcafe-a.1-x").touch()

    with pytest.raises(SegmentMissingError):
        space.attach("rx-0badcafe-a.1-x")


def test_a_missing_folder_is_not_mistaken_for_a_missing_segment(tmp_path):
    with pytest.raises(FileNotFoundError):
        ShmSpace("run", tmp_path / "none").create("a", 1, "x", 8)


def test_another_runs_segments_are_out_of_reach(space, tmp_path):
    other = ShmSpace("0badcafe2", tmp_path).create("a", 1, "x", 8).name

    for reach in (space.attach, space.unlink, space.try_lock, space.exists):
        with pytest.raises(SegmentNameError, match="in run 0badcafe"):
            reach(other)


def test_an_adopted_segment_belongs_to_the_new_owner(space):
    segment = space.create("rollout/0", 3, "g1", 8)

    name = space.adopt(segment.name, "queue", 1)
    segment.buf[0] = 9

    assert name == "rx-0badcafe-queue.1-g1@rollout~0.3"
    assert parse_name(name) == ("0badcafe", "queue", 1, "g1@rollout~0.3")
    assert space.names("rollout/0") == []
    assert space.names("queue", 1) == [name]
    assert space.attach(name).buf[0] == 9


def test_segments_of_two_owners_never_meet_under_one_name(space):
    names = [space.adopt(space.create(f"rollout/{i}", 1, "g1", 8).name, "queue", 1) for i in range(3)]

    assert space.names() == sorted(set(names))
    assert len(names) == 3


def test_an_adoption_may_be_passed_on_and_repeated(space):
    old = space.create("rollout/0", 1, "g1", 8).name
    first = space.adopt(old, "queue", 1)
    second = space.adopt(first, "queue", 2)

    assert second == "rx-0badcafe-queue.2-g1@rollout~0.1"
    assert space.adopt(first, "queue", 2) == second
    assert space.adopt(second, "queue", 2) == second
    assert space.names() == [second]


def test_an_adoption_cut_short_by_a_death_can_be_repeated(space, tmp_path):
    old = space.create("rollout/0", 1, "g1", 8).name
    new = "rx-0badcafe-queue.1-g1@rollout~0.1"
    (tmp_path / new).hardlink_to(tmp_path / old)

    assert space.adopt(old, "queue", 1) == new
    assert space.names() == [new]


def test_adopting_what_is_not_there_says_so(space):
    with pytest.raises(SegmentMissingError):
        space.adopt("rx-0badcafe-a.1-x", "queue", 1)


def test_renaming_never_replaces_a_segment(space):
    one, two = space.create("a", 1, "x", 8), space.create("a", 1, "y", 8)
    two.buf[0] = 2

    with pytest.raises(SegmentExistsError):
        space.rename(one.name, "a", 1, "y")

    assert space.attach(two.name).buf[0] == 2
    assert space.names() == [one.name, two.name]
    assert space.rename(one.name, "b", 0, "z") == "rx-0badcafe-b.0-z"


def test_a_sweep_takes_one_incarnation_and_nothing_else(space, tmp_path):
    doomed = [space.create("rollout/1", 2, label, 8).name for label in ("a", "b")]
    spared = [
        space.create("rollout/1", 22, "a", 8).name,
        space.create("rollout/11", 2, "a", 8).name,
        space.create("rollout", 2, "a", 8).name,
    ]
    other = ShmSpace("0badcafe2", tmp_path).create("rollout/1", 2, "a", 8).name
    (tmp_path / "someone-elses").touch()

    assert space.sweep("rollout/1", 2) == doomed
    assert space.names() == sorted(spared)
    assert space.sweep() == sorted(spared)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other, "someone-elses"]


def test_the_runs_of_a_folder_are_listed(space, tmp_path):
    assert other_runs(tmp_path) == []
    for run_id in ("b", "a", "b"):
        ShmSpace(run_id, tmp_path).create("x", len(other_runs(tmp_path)), "x", 1)
    (tmp_path / "rx-c").touch()

    assert other_runs(tmp_path) == ["a", "b"]


def test_unlinking_twice_is_fine(space):
    name = space.create("a", 1, "x", 8).name
    assert space.exists(name)

    space.unlink(name)
    space.unlink(name)

    assert not space.exists(name)


def test_a_lease_keeps_the_lock_away_until_the_last_view_is_gone(space):
    name = space.create("a", 1, "x", 8).name
    reader = space.attach(name, lease=True)
    second = space.attach(name, lease=True)
    view = reader.ndarray(np.uint8, (8,))

    assert space.try_lock(name) is None
    second.close()
    reader.close()
    assert space.try_lock(name) is None
    del view
    lock = space.try_lock(name)
    assert lock is not None
    lock.close()


def test_a_locked_segment_gives_no_lease_but_can_be_mapped(space):
    name = space.create("a", 1, "x", 8).name
    lock = space.try_lock(name)

    with pytest.raises(SegmentBusyError, match="rewritten"):
        space.attach(name, lease=True)
    assert space.try_lock(name) is None
    space.attach(name, writable=True).close()
    lock.close()
    lock.close()
    space.attach(name, lease=True).close()


def test_a_full_file_system_is_an_error_with_need_and_have():
    """Memory is reserved when the segment is made, so nothing is left to fail at first touch."""
    space = ShmSpace(f"test{os.getpid()}")
    stat = os.statvfs(space.root)
    need_bytes = (stat.f_blocks + 1) * stat.f_frsize

    with pytest.raises(SegmentSpaceError) as caught:
        space.create("a", 1, "x", need_bytes)

    assert caught.value.need_bytes == need_bytes
    assert 0 < caught.value.have_bytes < need_bytes
    assert str(need_bytes) in str(caught.value)
    assert space.names() == []


def test_a_segment_that_cannot_be_mapped_leaves_no_name(space):
    """Address space can run out too; the reservation must not outlive the failure."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        with pytest.raises(OSError, match="memory"):
            space.create("a", 1, "x", 1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)

    assert space.names() == []


def test_free_bytes_shrink_with_what_is_reserved():
    space = ShmSpace(f"free{os.getpid()}")

    def shrinks_by_what_is_reserved():
        before = space.free_bytes()
        with space.create("a", 1, "x", 8 << 20) as segment:
            after = space.free_bytes()
        space.unlink(segment.name)
        return before - after >= 8 << 20

    eventually(shrinks_by_what_is_reserved)  # others use the same file system, and may free more meanwhile
    assert space.sweep() == []


def test_a_file_cut_under_the_mapping_shows_before_it_is_touched(space, tmp_path):
    segment = space.create("a", 1, "x", 8192)
    assert segment.file_bytes == segment.nbytes == 8192

    os.truncate(tmp_path / segment.name, 100)

    assert segment.file_bytes == 100
