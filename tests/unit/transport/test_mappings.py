"""Mappings that outlive their leases."""

import pytest
from descriptors import descriptors_below

from transport import mappings
from transport.mappings import Mappings
from transport.shm import SegmentBusyError, SegmentMissingError, ShmSpace


@pytest.fixture
def space(tmp_path):
    return ShmSpace("run", tmp_path)


@pytest.fixture
def kept(space):
    made = Mappings(space)
    yield made
    made.close()


def create(space, label="b0", nbytes=100):
    with space.create("dcs", 0, label, nbytes) as segment:
        segment.buf[0] = 7
        return segment.name


def is_free(space, name):
    lock = space.try_lock(name)
    if lock is not None:
        lock.close()
    return lock is not None


def test_a_lease_ends_with_its_segment_and_the_mapping_stays(space, kept):
    name = create(space)
    with kept.lease(name) as segment:
        assert segment.buf[0] == 7
        assert segment.buf.readonly
        assert segment.file_bytes == segment.nbytes == 100
        assert not is_free(space, name)
    assert is_free(space, name)
    assert len(kept) == 1


def test_a_lease_lasts_as_long_as_any_view(space, kept):
    name = create(space)
    with kept.lease(name) as segment:
        view = segment.ndarray("uint8", (10,), 0)[2:4]
    del segment
    assert not is_free(space, name)
    del view
    assert is_free(space, name)


def test_two_leases_end_one_by_one(space, kept):
    name = create(space)
    first, second = kept.lease(name), kept.lease(name)
    first.close()
    assert not is_free(space, name)
    second.close()
    assert is_free(space, name)


def test_the_mapping_follows_the_segment_to_another_name(space, kept):
    name = create(space)
    kept.lease(name).close()
    renamed = space.rename(name, "dcs", 1, "b0")
    with space.attach(renamed, writable=True) as writer:
        writer.buf[0] = 8
    with kept.lease(renamed) as segment:
        assert segment.buf[0] == 8
    assert len(kept) == 1


def test_what_has_no_name_is_given_up_and_its_descriptors_with_it(space, kept):
    name = create(space)
    segment = kept.lease(name)
    kept.trim()
    assert len(kept) == 1
    space.unlink(name)
    kept.trim()
    assert len(kept) == 0
    assert segment.buf[0] == 7
    del segment
    assert descriptors_below(space.root) == []


def test_beyond_the_limit_segments_are_mapped_for_one_lease(space, kept, monkeypatch):
    monkeypatch.setattr(mappings, "KEPT", 1)
    names = [create(space, f"b{index}") for index in range(2)]
    for name in names:
        with kept.lease(name) as segment:
            assert segment.buf[0] == 7
            assert not is_free(space, name)
        assert is_free(space, name)
    assert len(kept) == 1


def test_a_segment_that_is_locked_missing_or_unfinished_is_refused(space, kept):
    name = create(space)
    lock = space.try_lock(name)
    with pytest.raises(SegmentBusyError):
        kept.lease(name)
    lock.close()
    (space.root / name).write_bytes(b"")
    with pytest.raises(SegmentMissingError):
        kept.lease(name)
    space.unlink(name)
    with pytest.raises(SegmentMissingError):
        kept.lease(name)
    assert descriptors_below(space.root) == []
