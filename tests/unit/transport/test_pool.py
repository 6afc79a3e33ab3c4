"""Arenas are used again when, and only when, nobody can need what is in them."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport import pool as pool_module
from transport.mappings import Mappings
from transport.pool import ARENA_BYTES, LEAST_BYTES, SegmentPool
from transport.shm import SegmentMissingError, SegmentSpaceError, ShmSpace

HALF = LEAST_BYTES // 2
MIB = 1 << 20


@pytest.fixture
def space(tmp_path):
    return ShmSpace("0a1b2c3d", tmp_path)


@pytest.fixture
def pool(space):
    return SegmentPool(space, "rollout/0", 1)


def filled(pool, nbytes, value):
    piece = pool.place(nbytes)
    piece.segment.buf[piece.offset : piece.offset + nbytes] = bytes([value]) * nbytes
    return piece


def test_pieces_lie_side_by_side_in_one_arena(space, pool):
    pieces = [pool.place(100) for _ in range(10)]
    assert [piece.offset for piece in pieces] == list(range(0, 1280, 128))
    assert len({piece.segment.name for piece in pieces}) == 1
    assert sorted(piece.name for piece in pieces) == [name for name in space.names() if "-rows" in name]
    assert len({(space.root / name).stat().st_ino for name in space.names()}) == 1


def test_an_arena_is_made_for_several_pieces_within_bounds(pool):
    pool.place(1)
    assert pool.nbytes == LEAST_BYTES
    pool.place(LEAST_BYTES)
    assert pool.nbytes == LEAST_BYTES * 9
    pool.place(ARENA_BYTES)
    assert pool.nbytes == LEAST_BYTES * 9 + ARENA_BYTES


def test_what_is_larger_than_an_arena_has_one_to_itself(pool):
    piece = pool.place(9 * MIB)
    assert 9 * MIB <= piece.segment.nbytes <= 9 * MIB * 5 // 4
    assert pool.place(1).segment.name != piece.segment.name or piece.segment.nbytes > 9 * MIB


def test_an_arena_is_used_again_when_its_last_piece_is_freed(space, pool):
    whole = [pool.place(LEAST_BYTES // 4) for _ in range(8)]
    arenas = {piece.segment.name for piece in whole}
    for piece in whole:
        space.unlink(piece.name)
    before = pool.nbytes
    for _ in range(64):
        piece = pool.place(LEAST_BYTES // 4)
        assert piece.segment.name in arenas
        space.unlink(piece.name)
    assert pool.nbytes == before


def test_one_piece_that_is_needed_keeps_its_arena(space, pool):
    kept = filled(pool, 1000, 7)
    for value in range(500):
        space.unlink(filled(pool, 100_000, value % 7).name)
    with space.attach(kept.name) as segment:
        assert bytes(segment.buf[kept.offset : kept.offset + 1000]) == b"\7" * 1000


def test_a_reader_keeps_an_arena_whose_pieces_are_freed(space, pool):
    piece = filled(pool, 1000, 7)
    reader = Mappings(space)
    segment = reader.lease(piece.name)
    space.unlink(piece.name)
    for value in range(500):
        space.unlink(filled(pool, 100_000, value % 7).name)
    assert bytes(segment.buf[piece.offset : piece.offset + 1000]) == b"\7" * 1000


def test_an_arena_that_was_swept_is_never_written_from_its_start(space, pool):
    """A zombie that others take for dead must not write over what they read."""
    piece = filled(pool, 1000, 7)
    name = space.adopt(piece.name, "rows", 1)
    space.sweep("rollout/0", 1)
    with pytest.raises(SegmentMissingError):
        pool.place(1000)
    filled_up = pool.place(ARENA_BYTES)  # in an arena of its own, which its next sweep finds
    assert filled_up.segment.name != piece.segment.name
    with space.attach(name) as segment:
        assert bytes(segment.buf[piece.offset : piece.offset + 1000]) == b"\7" * 1000


def test_arenas_not_needed_for_long_are_given_back(space, pool):
    many = [pool.place(ARENA_BYTES) for _ in range(6)]
    for piece in many:
        space.unlink(piece.name)
    for _ in range(40):
        space.unlink(pool.place(ARENA_BYTES).name)
    assert pool.nbytes == ARENA_BYTES


def test_a_full_file_system_costs_the_free_arenas_first(space, pool, monkeypatch):
    """Only when nothing is left to give back is the file system full."""
    space.unlink(pool.place(ARENA_BYTES).name)
    kept = pool.place(ARENA_BYTES)
    create = space.create
    room = 2 * ARENA_BYTES

    def create_within(owner, incarnation, label, nbytes):
        if pool.nbytes + nbytes > room:
            raise SegmentSpaceError(label, space.root, nbytes, room - pool.nbytes)
        return create(owner, incarnation, label, nbytes)

    monkeypatch.setattr(space, "create", create_within)
    assert pool.nbytes == ARENA_BYTES
    space.unlink(pool.place(room - pool.nbytes).name)
    space.unlink(kept.name)
    assert pool.place(room).segment.nbytes == room
    with pytest.raises(SegmentSpaceError):
        pool.place(64)


def test_nothing_is_no_piece(pool):
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        pool.place(0)


def test_a_closed_pool_leaves_what_has_a_name(space, pool):
    piece = filled(pool, 10, 3)
    pool.close()
    pool.close()
    assert space.names() == [piece.name]
    assert pool.nbytes == 0
    assert pool.place(10).segment.name != piece.segment.name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["place", "free", "lease", "drop"]), st.integers(1, 9)), max_size=60
    )
)
def test_no_piece_that_somebody_needs_ever_changes(steps, tmp_path_factory):
    """Whatever is placed, freed and read in whatever order: what has a name or a reader stays as written."""
    space = ShmSpace("0a1b2c3d", tmp_path_factory.mktemp("shm"))
    pool, readers = SegmentPool(space, "w", 1), Mappings(space)
    values, named, leased = itertools.count(1), [], []
    for step, size in steps:
        if step == "place":
            named.append((piece := filled(pool, size * HALF // 4, value := next(values) % 256), value))
            named[-1] = (piece.name, piece.offset, size * HALF // 4, value)
        elif step == "free" and named:
            space.unlink(named.pop(size % len(named))[0])
        elif step == "lease" and named:
            name, *where = named[size % len(named)]
            leased.append((readers.lease(name), *where))
        elif step == "drop" and leased:
            leased.pop(size % len(leased))
        for name, offset, nbytes, value in named:
            with space.attach(name) as segment:
                assert segment.buf[offset] == segment.buf[offset + nbytes - 1] == value
        for segment, offset, nbytes, value in leased:
            assert segment.buf[offset] == segment.buf[offset + nbytes - 1] == value


def test_sizes_are_few_and_at_most_a_quarter_larger():
    sizes = {pool_module._size(nbytes) for nbytes in range(MIB, 2 * MIB, 999)}
    assert len(sizes) <= 9
    assert all(nbytes <= pool_module._size(nbytes) <= nbytes * 5 // 4 for nbytes in range(512, MIB, 997))
