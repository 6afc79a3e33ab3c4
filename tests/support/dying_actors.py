"""Actors that leave something behind, hold on to things, or are hard to kill."""

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

from relax_actor import Actor, endpoint
from relax_actor.actor.courier import Courier
from relax_actor.actor.wire import Ready, Record

SLEEPER = "import time; time.sleep(600)"


class DeadlyPath(PurePosixPath):
    """Kills whoever looks at it."""

    def __fspath__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return ""


class Mortal(Actor):
    """Holds memory, starts children that detach themselves, hangs and forks on request."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.memory = None
        self.progressed = 0
        self.can_go_on = True
        time.sleep(start_s)

    @endpoint(idempotent=True)
    def where(self) -> tuple[int, int]:
        return os.getpid(), self.ctx.incarnation

    @endpoint
    def touch(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        for page in range(0, nbytes, mmap.PAGESIZE):
            self.memory[page] = 1

    @endpoint(timeout_s=600)
    def hang(self) -> None:
        self.ctx.progress("hanging on purpose")
        time.sleep(600)

    @endpoint(timeout_s=600)
    async def hang_softly(self) -> None:
        import asyncio

        await asyncio.sleep(600)

    @endpoint
    def hold_the_interpreter_lock(self) -> None:
        ctypes.PyDLL(None).sleep(600)

    @endpoint
    def die_of_the_answer(self) -> Path:
        """Return what kills this process when it is packed: the method is over, its answer is not sent."""
        return DeadlyPath("answer")

    @endpoint
    def one(self) -> int:
        return 1

    @endpoint
    def answer(self, nbytes: int, *, last: bool) -> bytes:
        """Return so much, and end with the last answer."""
        if last:
            self.ctx.finish()
        return bytes(nbytes)

    @endpoint
    def start_detached(self) -> int:
        return subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True).pid

    @endpoint
    def fork_detached(self) -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        return pid

    @endpoint
    def fork_and_exit(self) -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @endpoint
    def fork_and_live(self) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        return pid

    @endpoint
    def write_nowhere(self, text: str) -> None:
        """Print when no file may grow any more, as on a full disk."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        print(text, flush=True)  # noqa: T201 - it is the point
        sys.stderr.write(text)

    @endpoint
    def fail_when_asked_no_more(self) -> None:
        self.can_go_on = False

    def step(self) -> float | None:
        if not self.can_go_on:
            raise RuntimeError("it cannot go on")
        return None

    @endpoint
    def load_in_forks(self, items: int) -> list[int]:
        """Read through two forks, as training code does."""
        from torch.utils.data import DataLoader

        return [int(batch.sum()) for batch in DataLoader(range(items), num_workers=2)]

    @endpoint
    def environment(self, name: str) -> str:
        return os.environ.get(name, "")

    @endpoint
    def read_file(self, path: str) -> str:
        return Path(path).read_text()

    @endpoint(timeout_s=600)
    def eat_memory(self) -> None:
        eaten = []
        while True:
            eaten.append(b"x" * (8 << 20))


class Lingering(Actor):
    """Takes a second to stop."""

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        time.sleep(1.0)


class Fleeting(Actor):
    """Dies in its first life before the head has heard that it was ready: its word of that is lost."""

    def __init__(self, *, raises: bool) -> None:
        self.is_short_lived, self.raises = self.ctx.incarnation == 1, raises
        if self.is_short_lived:
            Courier.tell_head = _tell_all_but_ready

    def step(self) -> None:
        if self.is_short_lived and self.raises:
            raise RuntimeError("too short a life")
        if self.is_short_lived:
            os.kill(os.getpid(), signal.SIGKILL)


_tell_head = Courier.tell_head


def _tell_all_but_ready(courier: Courier, record: Record) -> None:
    if not isinstance(record, Ready):
        _tell_head(courier, record)
