"""A run folder has its files in known places and one launch at a time."""

import os
import socket
import subprocess
import sys
import time

import msgspec
import pytest

from launcher.errors import RunFolderError
from launcher.runfolder import LockHolder, RunFolder, expand, start_ticks

HOLD = """
import sys
from pathlib import Path
from launcher.runfolder import RunFolder
with RunFolder(Path(sys.argv[1])).locked("aaaa0000"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(str(tmp_path / "run"), name="x")


@pytest.fixture
def holder_process(folder):
    """Another process that holds the folder's lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_name_and_time_are_filled_in():
    now = time.strptime("2026-01-02 03:04:05", "%Y-%m-%d %H:%M:%S")

    assert str(expand("/r/{name}-{time}", name="a{}b", now=now)) == "/r/a{}b-20260102-030405"


def test_a_new_folder_has_places_for_everything(folder):
    assert {path.name for path in folder.path.iterdir()} == {"logs", "checkpoints", "crash"}
    assert folder.log_path("rollout/3", 2).name == "rollout-3-2.log"


def test_a_folder_that_cannot_be_made_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(RunFolderError, match=r"cannot be made: Not a directory\n\nhint: set --run-dir"):
        RunFolder.create(str(tmp_path / "file" / "run"), name="x")


def test_only_a_run_can_be_opened_and_the_newest_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=r"has an events\.jsonl"):
        RunFolder.open(tmp_path / "none")

    run = RunFolder.create(str(tmp_path / "old"), name="x")
    run.events.touch()
    with pytest.raises(RunFolderError, match=r"the newest run is .*old"):
        RunFolder.open(tmp_path / "none")
    assert RunFolder.open(run.path).events == run.events


def test_the_lock_says_who_holds_it(folder):
    with folder.locked("0123abcd"):
        holder = folder.holder()
        assert (holder.pid, holder.host, holder.run_id) == (os.getpid(), socket.gethostname(), "0123abcd")
        assert holder.is_alive


def test_a_second_launch_is_refused_with_pid_host_and_start_of_the_first(folder, holder_process):
    with pytest.raises(RunFolderError) as caught, folder.locked("b"):
        pass

    text = str(caught.value)
    assert f"pid {holder_process.pid} on {socket.gethostname()}, started 2" in text
    assert "hint: relax-actor stop" in text


def test_a_lock_is_free_after_its_holder_was_killed(folder, holder_process):
    holder_process.kill()
    holder_process.wait()

    with folder.locked("b"):
        assert folder.holder().pid == os.getpid()


def test_a_dead_launchers_child_that_kept_the_lock_is_overruled(folder, holder_process):
    stale = msgspec.structs.replace(folder.holder(), start_ticks=1)  # as if that pid had been given away
    folder.lock_file.write_bytes(msgspec.json.encode(stale))

    with folder.locked("b"):
        assert folder.holder().pid == os.getpid()


def test_a_lock_whose_holder_is_not_written_yet_is_respected(folder, holder_process):
    folder.lock_file.write_bytes(b"")

    with pytest.raises(RunFolderError, match="just starting"), folder.locked("b"):
        pass


def test_a_lock_file_replaced_meanwhile_is_not_taken(folder, monkeypatch):
    opened, os_open = [], os.open

    def open_and_replace(path, *args):
        fd = os_open(path, *args)
        if not opened:
            folder.lock_file.unlink()
        opened.append(fd)
        return fd

    monkeypatch.setattr(os, "open", open_and_replace)
    with folder.locked("b"):
        assert len(opened) == 2
        assert folder.lock_file.exists()


def test_a_holder_on_another_host_counts_as_alive():
    holder = LockHolder(pid=1, start_ticks=0, host="elsewhere", run_id="r", started_at="now")

    assert holder.is_alive


def test_a_process_that_is_gone_or_a_zombie_has_no_start():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(process.pid) is None
    process.wait()
    assert start_ticks(process.pid) is None
    assert start_ticks(os.getpid()) > 0


def test_a_lock_file_of_rubbish_names_nobody(folder):
    assert folder.holder() is None
    folder.lock_file.write_bytes(b"rubbish")
    assert folder.holder() is None
