"""What dead runs left is cleared away, and nothing of a living one is touched."""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from relax_actor.node import remains
from relax_actor.node.remains import FILE, claim, clear_dead
from transport.shm import ShmSpace


@pytest.fixture
def base(monkeypatch, tmp_path_factory):
    """This user's folder of socket folders, in a temporary folder with a short path."""
    tmp_path_factory.getbasetemp()  # not in it
    folder = tempfile.mkdtemp()
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield Path(folder) / f"rx-{os.getuid()}"
    shutil.rmtree(folder)


@pytest.fixture
def claimed(base, tmp_path):
    """Claim a folder for a run; what is not let go by the test is let go after it."""
    held = []

    def make(name, run_id):
        folder, descriptor = claim(name, run_id, str(tmp_path))
        held.append(descriptor)
        return folder, descriptor

    yield make
    for descriptor in held:
        try:
            os.close(descriptor)
        except OSError:
            continue


def segment_of(run_id, root):
    ShmSpace(run_id, root).create("mortal", 1, "page", 8)
    return ShmSpace(run_id, root)


def test_a_living_run_loses_nothing(base, claimed, tmp_path):
    folder, _ = claimed("one", "one")
    space = segment_of("one", tmp_path)
    assert clear_dead(base) == []
    assert folder.is_dir()
    assert len(space.names()) == 1


def test_what_a_dead_run_left_is_cleared_away_by_the_next_claim(claimed, tmp_path):
    folder, descriptor = claimed("one", "one")
    dead, other = segment_of("one", tmp_path), segment_of("other", tmp_path)
    os.close(descriptor)
    claimed("two", "two")
    assert not folder.exists()
    assert (dead.names(), len(other.names())) == ([], 1)


def test_a_run_lives_as_long_as_anyone_of_it_on_this_host(base, claimed, tmp_path):
    _, head = claimed("one", "one")
    _, keeper = claimed("one-host", "one")
    space = segment_of("one", tmp_path)
    os.close(head)
    assert clear_dead(base) == []
    assert len(space.names()) == 1
    os.close(keeper)
    assert clear_dead(base) == ["one"]
    assert list(base.iterdir()) == []


def test_a_run_may_start_again_under_its_id(claimed, tmp_path):
    folder, descriptor = claimed("one", "one")
    space = segment_of("one", tmp_path)
    os.close(descriptor)
    again, _ = claimed("one", "one")
    assert again == folder
    assert space.names() == []
    assert (again / FILE).exists()


def test_who_claims_a_folder_that_is_being_cleared_away_begins_anew(base, claimed):
    folder, descriptor = claimed("one", "one")
    os.close(descriptor)
    with remains._alone(folder) as is_alone:
        assert is_alone
        claims = threading.Thread(target=claimed, args=("one", "one"))
        claims.start()
        shutil.rmtree(folder, ignore_errors=True)  # as it is cleared away: the other may put a file there
    claims.join()
    assert (folder / FILE).exists()
    assert clear_dead(base) == []


def test_a_folder_that_goes_while_it_is_made_is_made_again(base, claimed, monkeypatch):
    """Between `mkdir` and the look at whose it is."""
    stat, gone = Path.stat, []

    def stat_of_what_went(path, **how):
        if path.name == "one" and not gone:
            gone.append(path)
            path.rmdir()
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", stat_of_what_went)
    folder, _ = claimed("one", "one")
    assert gone == [folder]
    assert (folder / FILE).exists()


def test_a_folder_that_says_nothing_is_left_alone(base, claimed):
    claimed("one", "one")
    for name, text in (("empty", ""), ("strange", "[]")):
        (base / name).mkdir()
        (base / name / FILE).write_text(text)
    (base / "bare").mkdir()
    assert clear_dead(base) == []
    assert len(list(base.iterdir())) == 4


def test_a_file_that_vanishes_while_it_is_looked_at_belongs_to_somebody_else(base, claimed):
    folder, _ = claimed("one", "one")
    (folder / FILE).unlink()
    with remains._alone(folder) as is_alone:
        assert not is_alone
