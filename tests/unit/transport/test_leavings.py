"""What other software leaves in shared memory goes with the actor that wrote it down; nothing else does."""

import mmap
import os
import shutil

import pytest

from transport import leavings
from transport.shm import ShmSpace


@pytest.fixture
def space(tmp_path):
    return ShmSpace("run", tmp_path)


@pytest.fixture
def note(space):
    return space.root / space.name("rollout/0", 1, leavings.LABEL)


@pytest.fixture
def left(tmp_path):
    file = tmp_path / "sglang_loads_1.shm"
    file.write_bytes(b"loads")
    return file


def test_a_sweep_removes_what_was_written_down_and_the_list(space, note, left):
    other = left.with_name("sglang_loads_2.shm")
    other.touch()
    leavings.write_down(note, [left])
    assert space.sweep("rollout/0", 1) == [note.name]
    assert (left.exists(), note.exists(), other.exists()) == (False, False, True)


def test_what_a_living_process_has_open_stays_until_it_is_closed(space, note, left):
    leavings.write_down(note, [left])
    with left.open("rb"):
        assert leavings.held_by(os.getpid(), left.parent) == {left}
        assert space.sweep() == []
        assert left.exists()
    assert space.sweep() == [note.name]
    assert not left.exists()


def test_a_file_is_known_by_the_name_it_has_now(note, left):
    """As with a semaphore: whoever makes it has it under a name that is gone."""
    with left.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        named = left.with_name("sem.mp-1")
        named.hardlink_to(left)
        left.unlink()
        assert leavings.held_by(os.getpid(), named.parent) == {named}
        file.close()
        assert leavings.held_by(os.getpid(), named.parent) == {named}
        leavings.write_down(note, [named])
        assert not leavings.remove(note)
        mapped.close()
    assert leavings.remove(note)
    assert not named.exists()


def test_what_has_no_name_any_more_is_no_file(left):
    with left.open("rb"):
        left.unlink()
        assert leavings.held_by(os.getpid(), left.parent) == set()
        left.parent.rename(left.parent.with_name("elsewhere"))
        assert leavings.held_by(os.getpid(), left.parent) == set()


def test_a_folder_goes_with_all_that_is_in_it(space, note, tmp_path):
    folder = tmp_path / "temporary"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").touch()
    leavings.write_down(note, [folder])
    assert space.sweep() == [note.name]
    assert not folder.exists()


def test_a_folder_that_will_not_go_stays_written_down(space, note, tmp_path, monkeypatch):
    """As when a process that dies puts something there at the last moment."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    leavings.write_down(note, [folder])
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert space.sweep() == []
    assert space.sweep() == [note.name]
    assert not folder.exists()


def test_a_line_that_is_torn_names_nothing(note, left):
    leavings.write_down(note, [left])
    note.write_bytes(note.read_bytes()[:-1])
    assert leavings.remove(note)
    assert left.exists()


def test_another_file_of_the_same_name_stays(note, left):
    leavings.write_down(note, [left])
    other = left.with_name("new")
    other.write_bytes(b"another")
    other.replace(left)
    assert leavings.remove(note)
    assert left.exists()


def test_another_users_file_stays(note, left, monkeypatch):
    leavings.write_down(note, [left])
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert leavings.remove(note)
    assert left.exists()


def test_files_that_are_gone_are_nobodys_business(note, left):
    leavings.write_down(note, [left])
    left.unlink()
    assert leavings.remove(note)
    leavings.write_down(note.with_name("none"), [left])
    assert not note.with_name("none").exists()
    assert leavings.remove(note.with_name("none"))


def test_what_finds_no_room_is_an_error_and_spoils_no_later_line(space, note, left, monkeypatch):
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, text: write(fd, text[:-4]))
        with pytest.raises(OSError, match="space"):
            leavings.write_down(note, [left])
    leavings.write_down(note, [left])
    assert space.sweep() == [note.name]
    assert not left.exists()


@pytest.mark.parametrize("line", ["x /dev/null\n", "1 relative\n", "\n", "\udcff\n"])
def test_a_line_that_is_no_lists_names_nothing(note, line):
    note.write_bytes(line.encode("utf-8", "surrogateescape"))
    assert leavings.remove(note)


def test_a_process_that_is_gone_has_nothing(tmp_path):
    assert leavings.held_by(2**22 + 1, tmp_path) == set()
