"""What a server's processes make in shared memory is seen while they live, and goes when they are dead."""

import errno
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from left_behind import LeftBehind
from watching import ended_after, eventually

from relax_actor.engines.sglang.server_files import COMPILED, SHARED_MEMORY, ServerFiles

SERVER = """
    import os, sys, tempfile
    from pathlib import Path

    descriptor, _ = tempfile.mkstemp()
    for line in sys.stdin:  # a file, as a child of mine or as I do it myself
        how, name = line.split()
        if how == "child" and os.fork():
            continue
        os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_RDWR)
"""
SEMAPHORE = """
    import multiprocessing, os, sys, tempfile

    descriptor, name = tempfile.mkstemp()
    held = multiprocessing.get_context("spawn").Lock()
    sys.stdin.read()
    os.unlink(name)
"""


class Play:
    """A process that makes files, those that were seen of it, and those it was told to make."""

    def __init__(self) -> None:
        self.seen: list[Path] = []
        self.files = ServerFiles(self.seen.extend)
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVER)],
            stdin=subprocess.PIPE,
            env=self.files.environment({}),
            text=True,
        )
        self.files.watch(self.process.pid)

    def make(self, how: str, prefix: str = "sglang_play_") -> Path:
        path = SHARED_MEMORY / f"{prefix}{secrets.token_hex(8)}"
        self.process.stdin.write(f"{how} {path.name}\n")
        self.process.stdin.flush()
        eventually(path.exists)
        return path

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.files.close()
        self.files.remove()

    def refuse(self, times: int) -> None:
        """Have no room for what is to be written down, so many times."""
        takes, left = self.seen.extend, iter(range(times))

        def remember(files) -> None:
            if next(left, None) is not None:
                raise OSError(errno.ENOSPC, "no room")
            takes(files)

        self.files._remember = remember


@pytest.fixture
def play():
    made = Play()
    yield made
    made.end()


@pytest.mark.parametrize("how", ["self", "child"])
def test_a_file_is_told_while_its_maker_lives_and_goes_with_it(play, how):
    for _ in range(2):  # whenever it comes
        file = play.make(how)
        eventually(lambda file=file: file in play.seen)
    play.end()
    assert not [path for path in play.seen if path.exists()]


def test_what_is_none_of_sglangs_stays(play):
    model = play.make("self", "weights_play_")
    file = play.make("self")
    eventually(lambda: file in play.seen)
    play.end()
    assert (model.exists(), file.exists()) == (True, False)
    model.unlink()


def test_what_somebody_elses_process_has_is_not_told(play):
    other = Play()
    theirs, ours = other.make("self"), play.make("self")
    eventually(lambda: theirs in other.seen and ours in play.seen)
    play.end()
    assert theirs.exists()
    assert (theirs in play.seen, ours in other.seen) == (False, False)
    other.end()


def test_what_could_not_be_told_is_told_later(play):
    play.refuse(5)  # more often than a new name is looked at
    file = play.make("self")
    eventually(lambda: file in play.seen)


def test_a_file_is_told_by_a_look_at_the_last_moment(play):
    play.files.close()  # nobody looks by himself
    file = play.make("self")
    play.process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(play.process.pid).status() == psutil.STATUS_STOPPED)
    play.files.look()
    assert file in play.seen


def test_temporary_files_have_a_folder_that_is_told_at_once_and_goes(play):
    (folder,) = play.seen
    eventually(lambda: len(list(folder.iterdir())) == 1)
    play.end()
    assert not folder.exists()


def test_the_environment_keeps_what_is_compiled_and_its_first_variable(play):
    """The first one marks the room for a process' title, and nobody may set it anew."""
    made = play.files.environment({"A": "1", "SGLANG_CACHE_DIR": "/cache"})
    assert next(iter(made)) == "A"
    assert made[COMPILED] == "/cache/inductor"
    assert made["TMPDIR"] == str(play.files.folder)
    assert play.files.environment({COMPILED: "/own"})[COMPILED] == "/own"


def test_what_the_tests_with_sglang_demand_is_there_after_an_end_in_order_only():
    """`LeftBehind`: a semaphore and a temporary file, of a process that is killed with who clears away."""
    left_behind = LeftBehind()
    try:
        in_order, killed = (semaphore_play() for _ in range(2))
        with ended_after(in_order), ended_after(killed):
            eventually(lambda: len(left_behind.left()) == 8)  # each has a process for its semaphore
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
            in_order.communicate()
            eventually(lambda: len(left_behind.left()) == 2)
    finally:
        left = left_behind.close(settle_s=0.0)
    assert {Path(each).name[:3] for each in left} == {"sem", "tmp"}
    assert not [each for each in left if Path(each).exists()]


def semaphore_play() -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(SEMAPHORE)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
