"""A run can be seen and stopped from another terminal."""

import io
import json
import signal
import subprocess
import sys
import threading

import msgspec
import pytest

from launcher import observe
from launcher.errors import RunFolderError
from launcher.observe import follow_status, status, stop
from launcher.runfolder import RunFolder

HEAD = """
import os, sys, threading
from pathlib import Path
from launcher.interrupts import catching
from launcher.runfolder import RunFolder
class Control:
    patience = int(sys.argv[2])
    is_over = False
    def stop(self, reason): self.hear("stop " + reason)
    def kill(self, reason): self.hear("kill " + reason)
    def hear(self, what):
        os.write(1, what.encode() + b"\\n")
        self.patience -= 1
        self.is_over = self.patience <= 0
control = Control()
with RunFolder(Path(sys.argv[1])).locked("aaaa0000"), catching() as signals:
    signals.obey(control)
    os.write(1, b"held\\n")
    while not control.is_over:
        threading.Event().wait(0.01)
    sys.exit(143)
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(str(tmp_path / "run"), name="x")


@pytest.fixture
def head(folder):
    """Start a process that holds the lock, takes signals as a launch does, and ends when told so often."""
    started = []

    def start(patience: int = 1) -> subprocess.Popen:
        command = [sys.executable, "-c", HEAD, str(folder.path), str(patience)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(function, *args, **options) -> str:
    out = io.StringIO()
    function(*args, out, **options)
    return out.getvalue()


def test_status_draws_the_run_and_says_whether_it_lives(folder, story, log_of, head):
    log_of(folder.events, *story)
    text = said(status, folder)
    assert "rollout/0" in text
    assert text.splitlines()[-1] == "the head is gone without a word (it never took the lock)"

    process = head()
    assert said(status, folder).splitlines()[-1].startswith(f"running: pid {process.pid} on ")
    process.kill()
    process.wait()
    assert f"gone without a word (pid {process.pid}" in said(status, folder)

    log_of(folder.events, {"kind": "run_ended", "exit_code": 0, "reason": "done"})
    assert said(status, folder).splitlines()[-1] == "ended with exit code 0: done"


def test_status_as_json_is_one_object(folder, story, log_of, head):
    log_of(folder.events, *story)
    process = head()

    state = json.loads(said(status, folder, as_json=True))

    assert (state["running"], state["head_pid"], state["run_id"]) == (True, process.pid, "0011aabb")
    assert state["children"]["rollout/0"]["phase"] == "starting"
    assert state["rewards"] == [[1, 0.25]]


def test_status_follows_until_the_head_is_gone(folder, story, log_of, head, monkeypatch):
    monkeypatch.setattr(observe, "POLL_S", 0.01)
    process = head()
    log_of(folder.events, *story)
    thread = threading.Timer(0.1, process.kill)
    thread.start()
    reaper = threading.Thread(target=process.wait)
    reaper.start()

    text = said(follow_status, folder)

    thread.join()
    reaper.join()
    assert "step 1: reward 0.25" in text


def reaped(process: subprocess.Popen) -> threading.Thread:
    thread = threading.Thread(target=process.wait)
    thread.start()
    return thread


def test_stop_terminates_the_head_and_waits_for_its_end(folder, head):
    process = head()
    thread = reaped(process)
    out = io.StringIO()

    assert stop(folder, out) == 0
    thread.join()
    assert process.returncode == 143
    assert out.getvalue().startswith(f"stopped: pid {process.pid} on ")


def test_stop_kill_does_not_wait_for_a_head_that_stops(folder, head):
    process = head(patience=2)
    thread = reaped(process)

    assert stop(folder, io.StringIO(), kill=True, timeout_s=60) == 0
    thread.join()
    assert process.stdout.read().splitlines()[-1].startswith(b"kill ")


def test_stop_kill_kills_a_head_that_could_take_no_signal_meanwhile(folder, head):
    process = head(patience=2)
    thread = reaped(process)
    process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, process.send_signal, (signal.SIGCONT,)).start()

    assert stop(folder, io.StringIO(), kill=True, timeout_s=60) == 0
    thread.join()
    assert process.stdout.read().splitlines()[-1].startswith(b"kill ")


def test_stop_kill_needs_no_second_signal_where_the_first_was_enough(folder, head):
    process = head()
    thread = reaped(process)

    assert stop(folder, io.StringIO(), kill=True) == 0
    thread.join()


def test_stop_gives_up_waiting_after_its_timeout(folder, head):
    head(patience=9)
    out = io.StringIO()

    assert stop(folder, out, timeout_s=0.05) == 1
    assert out.getvalue().startswith("still stopping: ")


def test_stopping_what_does_not_run_is_done_already(folder, head):
    out = io.StringIO()
    assert stop(folder, out) == 0
    process = head()
    process.kill()
    process.wait()
    assert stop(folder, out) == 0
    assert out.getvalue().count("is not running") == 2


def test_stop_never_signals_another_process_that_got_the_pid(folder, head):
    process = head()
    other = msgspec.structs.replace(folder.holder(), start_ticks=1)
    folder.lock_file.write_bytes(msgspec.json.encode(other))

    assert stop(folder, io.StringIO()) == 0
    assert observe._signal_and_wait(
        other, observe.STOP, timeout_s=0
    )  # found out only after the pid was opened
    assert process.poll() is None


def test_a_head_that_ends_before_it_is_signalled_is_gone(folder, head):
    process = head()
    holder = folder.holder()
    process.kill()
    process.wait()

    assert observe._signal_and_wait(holder, observe.STOP, timeout_s=None)


def test_a_head_that_ends_just_before_it_is_signalled_is_gone(folder, head, monkeypatch):
    process = head()
    is_alive = type(folder.holder()).is_alive

    def look_and_end(holder):
        found = is_alive.__get__(holder)
        process.kill()
        process.wait()
        return found

    monkeypatch.setattr(type(folder.holder()), "is_alive", property(look_and_end))
    assert observe._signal_and_wait(folder.holder(), observe.STOP, timeout_s=None)


def test_a_head_on_another_host_is_named_not_signalled(folder, head):
    head()
    elsewhere = msgspec.structs.replace(folder.holder(), host="elsewhere")
    folder.lock_file.write_bytes(msgspec.json.encode(elsewhere))

    with pytest.raises(RunFolderError, match="run this command on elsewhere"):
        stop(folder, io.StringIO())
