"""What is in the journal is there whole, and what is damaged is not read as something else."""

import os
import resource
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.transfer_queue.events import Fenced, Published, StreamEnded
from relax_actor.transfer_queue.journal import (
    Journal,
    JournalBusyError,
    JournalCorruptError,
    JournalSpaceError,
    read,
)

HEADER_BYTES = 16
MAGIC_BYTES = 8


def published(*versions):
    return [Published(version=version) for version in versions]


@contextmanager
def file_size_limit(nbytes):
    """Every write beyond `nbytes` of a file fails with EFBIG, after having filled it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.journal"


@pytest.fixture
def three_records(path):
    with Journal(path) as journal:
        for version in range(3):
            journal.append(published(version))
            journal.commit()
    return path


def test_what_is_committed_is_read_in_order(path):
    events = [Fenced(name="rollout/0", incarnation=2), *published(1, 2), StreamEnded()]
    with Journal(path, fsync=True) as journal:
        journal.append(events[:1])
        journal.append(events[1:3])
        journal.commit()
        journal.append(events[3:])
        journal.commit()
        assert journal.nbytes == path.stat().st_size
    assert list(read(path)) == events


def test_a_missing_journal_is_empty(path):
    assert list(read(path)) == []


def test_an_event_is_not_written_before_its_commit(path):
    with Journal(path) as journal:
        journal.append(published(1))
        assert list(read(path)) == []
        journal.close()
    assert list(read(path)) == []


def test_a_commit_of_nothing_writes_nothing(path):
    with Journal(path) as journal:
        before = journal.nbytes
        journal.append([])
        journal.commit()
        assert journal.nbytes == before == path.stat().st_size


def test_a_journal_goes_on_where_it_ended(three_records):
    with Journal(three_records) as journal:
        journal.append(published(3))
        journal.commit()
    assert list(read(three_records)) == published(0, 1, 2, 3)


def test_only_one_process_writes(path):
    with Journal(path), pytest.raises(JournalBusyError):
        Journal(path)
    Journal(path).close()


def test_zeros_behind_the_last_record_are_cut(three_records):
    whole = three_records.read_bytes()
    three_records.write_bytes(whole + bytes(1000))
    assert list(read(three_records)) == published(0, 1, 2)
    Journal(three_records).close()
    assert three_records.read_bytes() == whole


def test_a_last_record_of_wrong_bytes_is_cut(three_records):
    data = bytearray(three_records.read_bytes())
    data[-1] ^= 1
    three_records.write_bytes(data)
    assert list(read(three_records)) == published(0, 1)


def test_zeros_with_something_behind_them_are_damage(three_records):
    whole = three_records.read_bytes()
    three_records.write_bytes(whole + bytes(100) + b"x")
    with pytest.raises(JournalCorruptError) as caught:
        list(read(three_records))
    assert caught.value.offset == len(whole)


@given(data=st.data())
def test_any_flipped_bit_before_the_last_record_is_found(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("flip") / "ledger.journal"
    with Journal(path) as journal:
        for version in (1000, 2000):
            journal.append(published(version))
            journal.commit()
        last = journal.nbytes
        journal.append(published(3000))
        journal.commit()
    whole = path.read_bytes()
    at = data.draw(st.integers(0, last * 8 - 1))
    flipped = bytearray(whole)
    flipped[at // 8] ^= 1 << at % 8
    path.write_bytes(flipped)
    with pytest.raises(JournalCorruptError) as caught:
        list(read(path))
    assert caught.value.offset <= at // 8
    with pytest.raises(JournalCorruptError):
        Journal(path)
    assert path.read_bytes() == flipped


def test_another_kind_of_file_is_refused_and_left_alone(path):
    path.write_bytes(b'{"event": "published"}')
    with pytest.raises(JournalCorruptError, match="byte 0: this is not the beginning of a journal"):
        Journal(path)
    assert path.read_bytes() == b'{"event": "published"}'
    path.unlink()
    Journal(path).close()


def test_a_whole_record_of_something_else_is_refused(three_records):
    with Journal(three_records, encode=lambda _: b"\xc1") as journal:
        journal.append(published(9))
        journal.commit()
    with pytest.raises(JournalCorruptError, match="these are no events"):
        list(read(three_records))


def test_a_record_without_room_leaves_the_file_as_it_was_and_can_be_tried_again(three_records):
    whole = three_records.read_bytes()
    with Journal(three_records) as journal:
        journal.append(published(3))
        with file_size_limit(len(whole) + HEADER_BYTES + 1):
            with pytest.raises(JournalSpaceError) as caught:
                journal.commit()
            assert three_records.read_bytes() == whole
        assert caught.value.need_bytes > HEADER_BYTES
        assert caught.value.path == three_records
        journal.append(published(4))
        journal.commit()
    assert list(read(three_records)) == published(0, 1, 2, 3, 4)


def test_a_journal_that_cannot_begin_is_an_error(path):
    with file_size_limit(MAGIC_BYTES - 1), pytest.raises(JournalSpaceError):
        Journal(path)
    with Journal(path) as journal:
        assert journal.nbytes == MAGIC_BYTES


def test_another_error_is_itself(three_records):
    whole = three_records.read_bytes()
    with Journal(three_records) as journal:
        os.close(journal._fd)
        journal._fd = os.open(three_records, os.O_RDONLY)
        journal.append(published(3))
        with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
            journal.commit()
    assert three_records.read_bytes() == whole


def test_a_rewrite_replaces_everything(three_records):
    with Journal(three_records) as journal:
        journal.append(published(99))
        journal.rewrite(published(2))
        with pytest.raises(JournalBusyError):
            Journal(three_records)
        journal.append(published(3))
        journal.commit()
    assert list(read(three_records)) == published(2, 3)
    assert [file.name for file in three_records.parent.iterdir()] == [three_records.name]


def test_a_rewrite_without_room_leaves_the_old_journal(three_records):
    with Journal(three_records) as journal:
        with file_size_limit(journal.nbytes), pytest.raises(JournalSpaceError):
            journal.rewrite(published(*range(1000)))
        journal.append(published(3))
        journal.commit()
    assert list(read(three_records)) == published(0, 1, 2, 3)
    assert [file.name for file in three_records.parent.iterdir()] == [three_records.name]


def test_a_leftover_of_a_rewrite_that_died_does_no_harm(three_records):
    three_records.with_name(three_records.name + ".new").write_bytes(b"half")
    with Journal(three_records) as journal:
        journal.rewrite(published(7))
    assert list(read(three_records)) == published(7)
