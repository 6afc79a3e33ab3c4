"""The Linux calls behind supervision: death signals, process groups, pidfds. No policy here."""

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

ADOPTION_DEADLINE_S = 60.0
"""Far longer than the process between needs to end, also on a busy machine: whoever waits cannot go on."""

_POLL_S = 0.002


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process, by SIGKILL, when `parent` dies; die now if it is already gone.

    The signal is bound to the parent's thread that forked (or, after re-parenting, to its main thread), so
    parents must fork from a thread that lives as long as they do.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def die_with_pipe(pipe: int) -> None:
    """Have the kernel SIGKILL this process when the last write end of a pipe closes; die now if it has.

    Unlike `die_with_parent` this is bound to processes, not threads: the agent's death kills, whichever
    thread forked, and no interpreter lock is in the way. A file description remembers one owner only, so
    each process opens its own.

    Args:
        pipe: an inherited read end; it stays open and is not used.
    """
    own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        is_closed = os.read(own, 1) == b""
    except BlockingIOError:
        is_closed = False
    if is_closed:
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


def reap_strangers(known: Container[int]) -> None:
    """Collect the exit status of adopted children that are dead; what is known is its keeper's to reap."""
    with suppress(ChildProcessError):
        while True:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None or dead.si_pid in known:
                return
            os.waitpid(dead.si_pid, os.WNOHANG)


def awaits_adoption(pid: int) -> bool:
    """Whether a process is there, but as another's child."""
    fields = _stat(pid)
    return fields is not None and fields[1] != str(os.getpid())


def exit_of(pid: int) -> tuple[int | None, int | None] | None:
    """Look at a dead child's exit without reaping it.

    Returns:
        (exit code, None), (None, signal), or None while it lives or where it has been reaped.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return status.si_status, None
    return None, status.si_status


def children() -> Iterator[tuple[int, bool]]:
    """Yield the pid of each child of this process, own and adopted, and whether it is dead but not reaped."""
    me = str(os.getpid())
    for pid in everybody():
        if (fields := _stat(pid)) is not None and fields[1] == me:
            yield pid, fields[0] == "Z"


def end_children(within_s: float) -> None:
    """SIGKILL and reap every child, own and adopted, until none is left or the time is over."""
    deadline = time.monotonic() + within_s
    while _reap_all() and time.monotonic() < deadline:
        for child, _ in children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_S)


def _reap_all() -> bool:
    """Reap whom it can; whether somebody is left, who may still have children of their own."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def everybody() -> list[int]:
    """Return the pids of all processes of this host that can be seen."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - names are enough


def ending_of(pid: int) -> str:
    """Return in words why a process is ending, also before it is dead; empty where it is not."""
    fields = _stat(pid)
    status = int(fields[-1]) if fields is not None else 0
    if status == 0:
        return ""
    if number := status & 0x7F:
        return signal_name(number)
    return f"exit code {status >> 8}"


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot, or None if there is none.

    A pid together with its start time names a process; a pid alone may be reused.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
