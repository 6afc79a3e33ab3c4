"""The Linux calls behind supervision: death signals, process groups, pidfds. No policy here."""

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

ADOPTION_DEADLINE_S = 5.0


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when `parent` dies; die now if it is already gone.

    The signal is bound to the parent's thread that forked (or, after re-parenting, to its main thread), so
    parents must fork from a thread that lives as long as they do.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def await_adoption(parent: int) -> None:
    """Return once `parent` is this process' parent; the process that forked it has then ended.

    Raises:
        TimeoutError: it did not happen within `ADOPTION_DEADLINE_S`.
    """
    deadline = time.monotonic() + ADOPTION_DEADLINE_S
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {os.getpid()} was not adopted by {parent}")
        time.sleep(0.0005)


def is_single_threaded() -> bool:
    """Whether this process may fork without losing a thread that holds a lock."""
    return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208 - no Path objects in a hot zygote


def kill_group(group: int) -> bool:
    """SIGKILL every process of the group; False if none is left."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except PermissionError:  # only processes of another user are left: not ours
        return False
    return True


def reap_group(group: int) -> None:
    """Collect the exit status of every dead child that belonged to the group."""
    try:
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def exit_of(pid: int) -> tuple[int | None, int | None] | None:
    """Look at a dead child's exit without reaping it.

    Returns:
        (exit code, None), (None, signal), or None while it lives.
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return status.si_status, None
    return None, status.si_status


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot, or None if there is none.

    A pid together with its start time names a process; a pid alone may be reused.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def children_of(parent: int) -> list[int]:
    """Return the pids whose parent this process is, dead ones included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
