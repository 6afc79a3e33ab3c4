"""The stacks of a process that is about to be killed: they are waited for where some are to come."""

import asyncio
import math
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from watching import ended_after, eventually

from relax_actor.node import dump

pytestmark = pytest.mark.fault

LATE = """
    import faulthandler, signal, sys, time

    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def work():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # as if it had no processor
        print("ready", flush=True)
        time.sleep(0.5)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        time.sleep(600)

    work()
"""
HALTING = """
    import signal, sys, time

    def say(number, frame):
        for thread, function in (("Thread 0x1", "wait"), ("Current thread 0x2", "work")):
            print(f"{thread} (most recent call first):", file=sys.stderr)
            print(f'  File "a.py", line 1 in {function}', file=sys.stderr, flush=True)
            time.sleep(0.2)

    signal.signal(signal.SIGUSR1, say)
    print("ready", flush=True)
    while True:
        time.sleep(600)
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def start(log):
    started = []

    def start(source):
        with log.open("wb") as out:
            argv = [sys.executable, "-c", textwrap.dedent(source)]
            started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=out))
        assert started[-1].stdout.readline() == b"ready\n"
        return started[-1]

    yield start
    for process in started:
        with ended_after(process):
            pass


def dumped(process, log):
    asyncio.run(dump.dump_stacks(process.pid, log))
    return log.read_text()


def test_a_process_that_has_to_wait_for_a_processor_is_waited_for(start, log):
    assert "in work" in dumped(start(LATE), log)


def test_a_dump_that_halts_between_two_threads_is_waited_for(start, log):
    assert "in work" in dumped(start(HALTING), log)


def test_a_process_that_is_stopped_or_dead_is_not_waited_for(start, log, monkeypatch):
    monkeypatch.setattr(dump, "DUMP_DEADLINE_S", math.inf)
    process = start(HALTING)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert dumped(process, log) == ""
    process.kill()
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert dumped(process, log) == ""
    process.wait()
    assert dumped(process, log) == ""
