"""Rows that memory has no room for are read out of files, by the same references, and nothing is lost."""

import msgspec
import numpy as np
import pytest

from relax_actor.ids import Holder
from relax_actor.transfer_queue import memory as memory_module
from relax_actor.transfer_queue.memory import Memory, SpillError, ref_bytes, remove_spilled, spill_space
from relax_actor.transfer_queue.storage import RowReader, RowWriter
from transport.shm import SegmentMissingError, ShmSpace

ROW_BYTES = 4000


class Play:
    """A queue's memory, its producer and its readers."""

    def __init__(self, root):
        (root / "shm").mkdir()
        self.run_dir = root / "run"
        self.run_dir.mkdir()
        self.space = ShmSpace("0a1b2c3d", root / "shm")
        self.spill = spill_space("0a1b2c3d", self.run_dir)
        self.writer = RowWriter(self.space, Holder("rollout/0", 1))
        self.reader = RowReader(self.space, self.spill)
        self.holdings = []
        self.memory = self.queue(3 * ROW_BYTES)

    def queue(self, budget_bytes):
        return Memory(self.space, self.spill, budget_bytes, self.holdings)

    def put(self, group_id):
        (refs,) = self.writer.write([{"tokens": np.full(1000, group_id, np.int32)}])
        name = self.space.adopt(refs["tokens"].segment, "rows", 1)
        ref = msgspec.structs.replace(refs["tokens"], segment=name)
        self.holdings.append((group_id, ref))
        self.memory.took(name, [ref])
        return ref

    def in_memory(self):
        return [group_id for group_id, ref in self.holdings if self.space.exists(ref.segment)]

    def in_files(self):
        return [group_id for group_id, ref in self.holdings if self.spill.exists(ref.segment)]

    def assert_all_can_be_read(self):
        for group_id, ref in self.holdings:
            assert self.reader.read(ref).tolist() == [group_id] * 1000


@pytest.fixture
def play(tmp_path):
    return Play(tmp_path)


def test_a_segment_is_counted_once(play):
    ref = play.put(1)
    play.memory.took(ref.segment, [ref])
    assert play.memory.nbytes == ref_bytes(ref) == ROW_BYTES
    assert not play.memory.is_over
    play.memory.free(ref.segment)
    play.memory.free(ref.segment)
    assert play.memory.nbytes == 0
    with pytest.raises(SegmentMissingError):
        play.reader.read(ref)


def test_the_rows_served_last_move_until_a_quarter_of_the_budget_is_free(play):
    for group_id in (4, 0, 3, 1, 2):
        play.put(group_id)
    assert play.memory.is_over
    moved = play.memory.relieve(play.holdings)
    assert (moved.segments, moved.moved_bytes) == (3, 3 * ROW_BYTES)
    assert moved.memory_bytes == play.memory.nbytes == 2 * ROW_BYTES
    assert moved.is_enough
    assert play.in_memory() == [0, 1]
    assert play.in_files() == [4, 3, 2]
    play.assert_all_can_be_read()


def test_arenas_of_moved_rows_are_written_again(play):
    """What moves is room for what comes: memory stays bounded whatever is put."""
    for group_id in range(400):
        play.put(group_id)
        if play.memory.is_over:
            play.memory.relieve(play.holdings)
    inodes = {path.stat().st_ino: path.stat().st_size for path in play.space.root.iterdir()}
    assert sum(inodes.values()) <= 2 << 20  # of 1.6 MB of rows, 12 kB may stay
    play.assert_all_can_be_read()


def test_a_turn_moves_a_bounded_amount(play, monkeypatch):
    monkeypatch.setattr(memory_module, "TURN_BYTES", ROW_BYTES)
    for group_id in range(6):
        play.put(group_id)
    turns = [play.memory.relieve(play.holdings) for _ in range(5)]
    assert [turn.segments for turn in turns] == [1, 1, 1, 1, 0]
    assert [turn.is_enough for turn in turns] == [False, False, False, False, True]


def test_a_moved_row_is_freed_like_any_other(play):
    refs = [play.put(group_id) for group_id in range(5)]
    play.memory.relieve(play.holdings)
    view = play.reader.read(refs[4])
    play.memory.free(refs[4].segment)
    assert play.in_files() == [2, 3]
    assert view.tolist() == [4] * 1000
    del view
    with pytest.raises(SegmentMissingError):
        play.reader.read(refs[4])
    with pytest.raises(SegmentMissingError):
        RowReader(play.space).read(refs[3])  # a reader without a spill folder


def test_a_view_stays_as_it_is_while_its_row_moves(play):
    views = [(group_id, play.reader.read(play.put(group_id))) for group_id in range(5)]
    play.memory.relieve(play.holdings)
    for value in range(300):
        refs = play.writer.write([{"tokens": np.full(1000, -value, np.int32)}])
        play.space.unlink(refs[0]["tokens"].segment)
    assert all(view.tolist() == [group_id] * 1000 for group_id, view in views)


def test_a_full_disk_moves_nothing_and_loses_nothing(play):
    """The error says what to do, and the next try goes through."""
    for group_id in range(5):
        play.put(group_id)
    (play.spill.root / ".unfinished").symlink_to("/dev/full")
    with pytest.raises(SpillError, match=r"No space left on device(.|\n)*raise queue\.max_size_gb") as caught:
        play.memory.relieve(play.holdings)
    assert caught.value.need_bytes == ROW_BYTES
    assert play.in_memory() == [0, 1, 2, 3, 4]
    assert play.in_files() == []
    assert play.memory.nbytes == 5 * ROW_BYTES
    assert play.memory.relieve(play.holdings).segments == 3
    play.assert_all_can_be_read()


@pytest.mark.parametrize("died", ["before the file had its name", "before the segment lost its name"])
def test_the_next_queue_puts_an_unfinished_move_right(play, died):
    refs = [play.put(group_id) for group_id in range(5)]
    play.memory.relieve(play.holdings)
    if died == "before the file had its name":
        (play.spill.root / ".unfinished").write_bytes(b"half")
    else:
        with play.space.attach(refs[0].segment) as segment:
            (play.spill.root / refs[0].segment).write_bytes(segment.buf)
    orphan = play.spill.root / play.space.name("rows", 1, "rows999")
    orphan.write_bytes(b"whose rows are trained")
    again = play.queue(3 * ROW_BYTES)
    assert again.nbytes == play.memory.nbytes == 2 * ROW_BYTES
    assert sorted(path.name for path in play.spill.root.iterdir()) == sorted(ref.segment for ref in refs[2:])
    play.assert_all_can_be_read()


def test_the_spill_folder_goes_with_the_run(play):
    for group_id in range(5):
        play.put(group_id)
    play.memory.relieve(play.holdings)
    remove_spilled("0a1b2c3d", play.run_dir)
    remove_spilled("0a1b2c3d", play.run_dir)
    assert list(play.run_dir.iterdir()) == []


def test_an_empty_array_moves_too(play):
    ref = play.put(9)
    (refs,) = play.writer.write([{"none": np.empty(0, np.int32)}])
    holdings = [(10, refs["none"]), *play.holdings]
    tight = Memory(play.space, play.spill, 1, holdings)
    tight.relieve(holdings)
    assert play.reader.read(refs["none"]).shape == (0,)
    assert play.reader.read(ref).tolist() == [9] * 1000
