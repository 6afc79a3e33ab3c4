"""Trainer and rollouts of a host take turns in having a GPU's memory, by locks that the kernel frees.

Every rollout has a lock of its own while it is awake; the trainer has all of them while it trains, and one
more from when it begins to wait for them, which is how rollouts learn that they shall sleep. A lock is a file
in the run folder. A server inherits its rollout's lock, so that the GPU does not count as free before both
are dead. Whoever dies gives back what it had, whatever it was at.
"""

import fcntl
import os
import signal
import socket
from pathlib import Path

FOLDER = "turns"
TRAINER = "trainer"


class RolloutTurn:
    """A rollout's right to have memory on the GPU.

    Args:
        folder: of the locks of this run.
        name: of the rollout; its next incarnation waits until the last one's server is dead, too.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._trainer = _opened(folder, TRAINER)
        self.fd = _opened(folder, name)  # a server inherits it
        self.is_mine = self._is_ready = False

    def is_wanted(self) -> bool:
        """Whether the trainer has its turn, or waits for it."""
        if not _try_lock(self._trainer, fcntl.LOCK_SH):
            return True
        _unlock(self._trainer)
        return False

    def try_take(self) -> bool:
        """Take the turn, unless the trainer has it or waits for it; return whether it is ours."""
        if not self.is_mine and not self.is_wanted() and _try_lock(self.fd, fcntl.LOCK_EX):
            if self.is_wanted():  # since a moment ago; it may not have seen that the lock was free
                _unlock(self.fd)
            else:
                self.is_mine = True
                self._say_who()
        return self.is_mine

    def be_ready(self) -> None:
        """Say that this process can sleep when it is asked to: from now on it may be ended if it does not."""
        self._is_ready = True
        self._say_who()

    def give_up(self) -> None:
        """Let the trainer have it."""
        _unlock(self.fd)
        self.is_mine = False

    def _say_who(self) -> None:
        os.ftruncate(self.fd, 0)  # what is there may be a predecessor's
        if self._is_ready:
            os.pwrite(self.fd, str(os.getpid()).encode(), 0)


class TrainerTurn:
    """The trainer's right to have a GPU for itself.

    Args:
        folder: of the locks of this run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._own = folder, _opened(folder, TRAINER)
        self._has_own = False
        self._taken: dict[str, int] = {}

    def try_take(self) -> tuple[str, ...]:
        """Say that the turn is wanted, and take it; return who does not sleep yet, nobody once it is ours."""
        if not self._has_own:
            self._has_own = _try_lock(self._own, fcntl.LOCK_EX)
        if not self._has_own:  # a rollout looks at it just now
            return (TRAINER,)
        return tuple(name for name in self._rollouts() if not self._take(name))

    def give_up(self) -> None:
        """Let the rollouts wake."""
        for fd in self._taken.values():
            os.close(fd)
        self._taken.clear()
        _unlock(self._own)
        self._has_own = False

    def end(self, name: str) -> int:
        """Kill a rollout that has its turn and could give it up.

        Returns:
            Its pid; 0 where it sleeps, is dead, or still starts, which others watch over.
        """
        fd = _opened(self._folder, name)
        try:
            pid = int(os.pread(fd, 20, 0) or 0)
            if not pid or pid == os.getpid():
                return 0
            try:
                process = os.pidfd_open(pid)
            except ProcessLookupError:
                return 0
            try:
                if _try_lock(fd, fcntl.LOCK_SH):  # whose pid this is has given it up
                    return 0
                signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)
            return pid
        finally:
            os.close(fd)

    def _rollouts(self) -> list[str]:
        """Return the locks there are, after `_own` is held: who comes later sees that and waits."""
        own = f"{_stem(TRAINER)}.lock"
        locks = self._folder.glob(f"{_stem('')}*.lock")
        return sorted(path.stem.removeprefix(_stem("")) for path in locks if path.name != own)

    def _take(self, name: str) -> bool:
        if name in self._taken:
            return True
        fd = _opened(self._folder, name)
        if _try_lock(fd, fcntl.LOCK_EX):
            self._taken[name] = fd
            return True
        os.close(fd)
        return False


def _opened(folder: Path, name: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / f"{_stem(name)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _stem(name: str) -> str:
    """Return a lock's name: turns are those of one host."""
    return f"{socket.gethostname()}~{name.replace('/', '-')}"


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
