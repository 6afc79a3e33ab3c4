"""A run can be seen and stopped from another terminal."""

import io
import json
import subprocess
import sys
import threading

import msgspec
import pytest

from launcher import observe
from launcher.errors import RunFolderError
from launcher.observe import follow_status, log_name, logs, status, stop
from launcher.runfolder import RunFolder

HEAD = """
import signal, sys
from pathlib import Path
from launcher.runfolder import RunFolder
patience = [int(sys.argv[2])]
def on_term(*_):
    patience[0] -= 1
    print("term", flush=True)
    if patience[0] <= 0:
        sys.exit(143)
signal.signal(signal.SIGTERM, on_term)
with RunFolder(Path(sys.argv[1])).locked("aaaa0000"):
    print("held", flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(str(tmp_path / "run"), name="x")


@pytest.fixture
def head(folder):
    """Start a process that holds the lock and ends at the n-th SIGTERM."""
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


@pytest.fixture
def log_files(folder):
    folder.log_path("rollout/0", 1).write_text("a1\na2\n")
    folder.log_path("rollout/0", 2).write_text("b1\nhalf a line")
    folder.log_path("rollout/10", 1).write_text("c1\n")
    folder.log_path("trainer", 1).write_bytes(b"\xff\x1b[2J\n")
    (folder.logs / "agent.log").write_text("x\n")


def test_log_lines_carry_actor_and_incarnation(folder, log_files):
    assert said(logs, folder).splitlines() == [
        "rollout/0#1 | a1",
        "rollout/0#1 | a2",
        "rollout/0#2 | b1",
        "rollout/10#1 | c1",
        "trainer#1 | \\xff\\x1b[2J",
    ]


@pytest.mark.parametrize("actor", ["rollout/0", "rollout-0"])
def test_logs_of_one_actor(folder, log_files, actor):
    assert said(logs, folder, actor=actor, last=1).splitlines() == ["rollout/0#1 | a2", "rollout/0#2 | b1"]


def test_logs_of_a_role_are_those_of_all_its_replicas(folder, log_files):
    assert "rollout/10#1 | c1" in said(logs, folder, actor="rollout")


def test_an_actor_without_a_log_is_an_error_that_lists_those_with_one(folder, log_files):
    with pytest.raises(RunFolderError, match="there are rollout/0, rollout/10, trainer"):
        said(logs, folder, actor="rollot")


def test_logs_of_a_run_that_has_none_yet(folder):
    with pytest.raises(RunFolderError, match="no actor has been started yet"):
        said(logs, folder)


def test_only_the_last_lines_of_a_long_log_are_read(folder):
    folder.log_path("trainer", 1).write_text("".join(f"{n}\n" for n in range(100_000)))

    assert said(logs, folder, last=2).splitlines() == ["trainer#1 | 99998", "trainer#1 | 99999"]
    assert said(logs, folder, last=0) == ""


def test_following_logs_sees_growth_and_new_incarnations(folder, head, monkeypatch):
    monkeypatch.setattr(observe, "POLL_S", 0.01)
    process = head()
    folder.log_path("trainer", 1).write_text("one\ntw")

    class Script(io.StringIO):
        def flush(self) -> None:
            steps.pop(0)() if steps else None

    def grow() -> None:
        with folder.log_path("trainer", 1).open("a") as file:
            file.write("o\n")
        folder.log_path("trainer", 2).write_text("three\n")

    def end() -> None:
        process.kill()
        process.wait()

    steps = [grow, end]
    out = Script()
    logs(folder, out, follow=True)

    assert out.getvalue().splitlines() == ["trainer#1 | one", "trainer#1 | two", "trainer#2 | three"]


def test_following_a_run_that_is_over_ends_at_once(folder):
    assert said(logs, folder, follow=True) == ""


def test_a_log_name_is_an_actor_and_its_incarnation(folder):
    assert log_name(folder.log_path("trainer", 3)) == "trainer#3"
    assert log_name(folder.log_path("rollout/12", 3)) == "rollout/12#3"


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


def test_stop_kill_terminates_twice(folder, head):
    process = head(patience=2)
    thread = reaped(process)

    assert stop(folder, io.StringIO(), kill=True) == 0
    thread.join()
    assert process.stdout.read() == b"term\nterm\n"


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
    assert observe._signal_and_wait(other, times=1, timeout_s=0)  # found out only after the pid was opened
    assert process.poll() is None


def test_a_head_that_ends_before_it_is_signalled_is_gone(folder, head):
    process = head()
    holder = folder.holder()
    process.kill()
    process.wait()

    assert observe._signal_and_wait(holder, times=1, timeout_s=None)


def test_a_head_on_another_host_is_named_not_signalled(folder, head):
    head()
    elsewhere = msgspec.structs.replace(folder.holder(), host="elsewhere")
    folder.lock_file.write_bytes(msgspec.json.encode(elsewhere))

    with pytest.raises(RunFolderError, match="run this command on elsewhere"):
        stop(folder, io.StringIO())
