"""The folder of one run: where each file lies, and the lock that keeps a second launch out.

docs/reference/run-folder.md describes the files. The lock is an flock on the file `lock`, which the kernel
releases however its holder ends; the file also says who holds it, so that people can be told and
`relax-actor stop` can find the process by pid AND start time, which together are never reused.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from launcher.errors import RunFolderError


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs, or ran, in a run folder."""

    pid: int
    start_ticks: int  # since boot, field 22 of /proc/PID/stat
    host: str
    run_id: str
    started_at: str  # local time, ISO 8601

    @property
    def is_alive(self) -> bool:
        """Whether that very process lives; a process of another host counts as alive."""
        return self.host != socket.gethostname() or start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, started {self.started_at}"


class RunFolder:
    """Paths of a run. Making the object touches nothing; see `create` and `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.resolved = path / "resolved.toml"
        self.plan = path / "plan.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.crash = path / "crash"
        self.picture = path / "reward.png"
        self.timeline = path / "timeline.json"
        self.tensorboard = path / "tensorboard"
        self.lock_file = path / "lock"

    @classmethod
    def create(
        cls, pattern: str, *, name: str, now: time.struct_time | None = None, logs: str = ""
    ) -> "RunFolder":
        """Make the folder, or go on in one that exists.

        Args:
            pattern: a path in which `{name}` and `{time}` are filled in.
            name: of the run.
            now: local time.
            logs: where to put a folder for logs, to which `logs` then leads; empty: nowhere else.

        Raises:
            RunFolderError: it cannot be made.
        """
        folder = cls(expand(pattern, name=name, now=now or time.localtime()))
        try:
            if logs:
                folder._lead_logs(Path(logs) / folder.path.name)
            for path in (folder.logs, folder.checkpoints, folder.crash):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"`{folder.path}` cannot be made: {error.strerror}", "set --run-dir"
            ) from None
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that has been launched.

        Raises:
            RunFolderError: there is no such run.
        """
        folder = cls(path)
        # Not Path.exists, which raises where a name is too long.
        if not any(map(os.path.exists, (folder.events, folder.lock_file))):
            raise RunFolderError(f"`{path}` is not a run folder", _runs_nearby(path))
        return folder

    def log_path(self, actor: str, incarnation: int) -> Path:
        """Return where an incarnation of an actor writes its output."""
        return self.logs / f"{actor.replace('/', '-')}-{incarnation}.log"

    def crash_path(self, actor: str, incarnation: int, suffix: str = "") -> Path:
        """Return the crash folder of an incarnation; with a suffix the file of that kind beside it."""
        return self.crash / f"{actor.replace('/', '-')}-{incarnation}{suffix}"

    def holder(self) -> LockHolder | None:
        """Return who runs, or last ran, in this folder."""
        try:
            return msgspec.json.decode(self.lock_file.read_bytes(), type=LockHolder)
        except (OSError, ValueError):
            return None

    @contextmanager
    def locked(self, run_id: str) -> Iterator[None]:
        """Keep every other launch out of the folder while the block runs.

        Raises:
            RunFolderError: a live process holds it; names its pid, host and start time.
        """
        fd = self._acquire()
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(_this_process(run_id)), 0)
            yield
        finally:
            os.close(fd)

    def _lead_logs(self, elsewhere: Path) -> None:
        """Have `logs` be a link; logs that are there already stay where they are.

        Raises:
            RunFolderError: there are logs of an earlier run.
        """
        elsewhere.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        if self.logs.is_dir() and not self.logs.is_symlink():
            raise RunFolderError(f"`{self.logs}` is there already", "leave --log-dir out, or move it away")
        if not self.logs.is_symlink():
            self.logs.symlink_to(elsewhere)

    def _acquire(self) -> int:
        for _ in range(3):
            fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            locked = _try_lock(fd)
            if locked and _is_file(fd, self.lock_file):
                return fd
            again = locked or self._overruled(fd)  # locked, but another launch has replaced the file
            os.close(fd)
            if not again:
                break
        holder = self.holder()
        raise RunFolderError(
            f"`{self.path}` is in use by {holder or 'a process that is just starting'}",
            f"relax-actor stop {self.path}, or give another --run-dir",
        )

    def _overruled(self, fd: int) -> bool:
        """Take away a lock that only a dead launcher's child still has, through an inherited descriptor."""
        holder = self.holder()
        if holder is None or holder.is_alive or not _is_file(fd, self.lock_file):
            return False
        self.lock_file.unlink(missing_ok=True)
        return True


def expand(pattern: str, *, name: str, now: time.struct_time) -> Path:
    """Fill `{name}` and `{time}` into a run folder's pattern."""
    stamp = time.strftime("%Y%m%d-%H%M%S", now)
    return Path(pattern.replace("{name}", name).replace("{time}", stamp)).absolute()


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_file(fd: int, path: Path) -> bool:
    """Whether a path still leads to the open file; another launch may have replaced it."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _this_process(run_id: str) -> LockHolder:
    return LockHolder(
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        host=socket.gethostname(),
        run_id=run_id,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _runs_nearby(path: Path) -> str:
    for parent in (path, path.parent, Path("runs")):
        runs = sorted(parent.glob("*/events.jsonl"), key=lambda file: file.stat().st_mtime)
        if runs:
            return f"the newest run is {runs[-1].parent}"
    return "a run folder has an events.jsonl"
