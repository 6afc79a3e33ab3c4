"""A dump is whole when the signal that asked for it has been handled, however slow that is."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from watching import eventually

from relax_actor.node import dump
from relax_actor.node.dump import dump_stacks
from relax_actor.node.facts import Handling
from relax_actor.stacks import parse_dump

DUMPER = """
import faulthandler, os, signal, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
faulthandler.register(signal.SIGUSR1, file=int(sys.argv[1]), all_threads=True)
def busy_here():
    print("ready", flush=True)
    while True: pass
busy_here()
"""


@pytest.fixture
def dumper():
    """Start a process that dumps its stacks into a file that is open here."""
    started = []

    def start(descriptor):
        command = [sys.executable, "-c", DUMPER, str(descriptor)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[descriptor])
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def full_pipe():
    """Return both ends of a pipe into which nothing more can be written."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(4096))
    os.set_blocking(theirs, True)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_a_signal_is_not_over_while_its_handler_runs(dumper, full_pipe):
    ours, theirs = full_pipe
    process = dumper(theirs)
    handling = Handling(process.pid, signal.SIGUSR1)
    assert handling.is_over
    process.send_signal(signal.SIGUSR1)
    eventually(lambda: _waits_in_write(process.pid))
    assert not handling.is_over
    os.set_blocking(ours, False)
    eventually(lambda: _drained(ours) and handling.is_over)


def test_a_signal_that_nobody_has_taken_is_not_over(dumper, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = dumper(log.fileno())
    handling = Handling(process.pid, signal.SIGUSR1)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    process.send_signal(signal.SIGUSR1)
    assert not handling.is_over
    process.send_signal(signal.SIGCONT)
    eventually(lambda: handling.is_over)
    process.kill()
    eventually(lambda: handling.is_over)  # nobody has waited for it yet
    process.wait()
    assert handling.is_over


def test_a_dump_that_has_returned_is_whole(dumper, tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = dumper(file.fileno())
    asyncio.run(dump_stacks(process.pid, log))
    threads = parse_dump(log.read_text().splitlines())
    assert [thread.frames[-1].function for thread in threads][-1] == "<module>"
    assert {"busy_here", "wait"} <= {frame.function for thread in threads for frame in thread.frames}


@pytest.mark.parametrize("state", ["stopped", "dead", "gone"])
def test_who_writes_nothing_is_not_waited_for(dumper, tmp_path, monkeypatch, state):
    monkeypatch.setattr(dump, "DUMP_DEADLINE_S", 1e9)
    with (tmp_path / "log").open("wb") as log:
        process = dumper(log.fileno())
    process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    if state == "gone":
        process.wait()
    else:
        how = os.WSTOPPED if state == "stopped" else os.WEXITED
        os.waitid(os.P_PID, process.pid, how | os.WNOWAIT)
    asyncio.run(dump_stacks(process.pid, tmp_path / "log"))
    assert (tmp_path / "log").read_bytes() == b""


def test_who_writes_elsewhere_is_not_waited_for(dumper, tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "DUMP_DEADLINE_S", 1e9)
    with (tmp_path / "other").open("wb") as other:
        process = dumper(other.fileno())
    asyncio.run(dump_stacks(process.pid, tmp_path / "log"))
    assert b"busy_here" in (tmp_path / "other").read_bytes()


def _waits_in_write(pid):
    """Whether a process that is busy otherwise sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _drained(descriptor):
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except BlockingIOError:
        return True
