"""`relax-actor status`, `logs` and `stop`: seeing and ending a run from another terminal."""

import dataclasses
import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from launcher.console import Display, render
from launcher.errors import RunFolderError
from launcher.runfolder import LockHolder, RunFolder
from launcher.runstate import RunState
from launcher.wording import clean
from relax_actor.telemetry import read_events

POLL_S = 0.2
_TAIL_BYTES_A_LINE = 1024


def status(folder: RunFolder, out: TextIO, *, as_json: bool = False) -> None:
    """Print where a run stands."""
    state = _state(folder)
    if as_json:
        out.write(json.dumps(_as_dict(state, folder), default=list) + "\n")
        return
    from rich.console import Console  # noqa: PLC0415 - rich is not imported by --help

    Console(file=out, width=None if out.isatty() else 120).print(render(state))
    out.write(_liveness(state, folder) + "\n")


def follow_status(folder: RunFolder, out: TextIO) -> None:
    """Show a run until it ends."""
    display = Display(folder.events, out, live=out.isatty())
    try:
        while _is_running(folder):
            display.tick()
            time.sleep(POLL_S)
    finally:
        display.close()


def logs(folder: RunFolder, out: TextIO, *, actor: str = "", last: int = 20, follow: bool = False) -> None:
    """Print the newest lines of actors' logs, each with its actor and incarnation before it.

    Args:
        folder: of the run.
        out: where to.
        actor: `rollout/3`, or a role for all its replicas; all actors if empty.
        last: lines a log.
        follow: go on until the run ends, new incarnations included.

    Raises:
        RunFolderError: no such actor has a log.
    """
    tails = {path: _Tail(path, last) for path in _log_files(folder, actor)}
    if not tails and not follow:
        raise RunFolderError(f"`{folder.path}` has no log of `{actor or 'any actor'}`", _known_actors(folder))
    running = True
    while running:
        running = follow and _is_running(folder)
        for path in _log_files(folder, actor):
            tail = tails.setdefault(path, _Tail(path, None))
            out.writelines(f"{log_name(path)} | {clean(line)}\n" for line in tail.lines())
        out.flush()
        if running:
            time.sleep(POLL_S)


def stop(folder: RunFolder, out: TextIO, *, kill: bool = False, timeout_s: float | None = None) -> int:
    """Ask the run's head to stop, and wait until it is gone.

    Args:
        folder: of the run.
        out: where to say what happened.
        kill: do not wait for actors to stop.
        timeout_s: give up waiting after this long; None waits as long as it takes.

    Returns:
        0 where no process of the head is left, 1 where it still lives.

    Raises:
        RunFolderError: the head runs on another host.
    """
    holder = folder.holder()
    if holder is None or not holder.is_alive:
        out.write(f"`{folder.path}` is not running\n")
        return 0
    if holder.host != os.uname().nodename:
        raise RunFolderError(f"`{folder.path}` runs on {holder.host}", f"run this command on {holder.host}")
    gone = _signal_and_wait(holder, times=2 if kill else 1, timeout_s=timeout_s)
    out.write(f"{'stopped' if gone else 'still stopping'}: {holder}\n")
    return 0 if gone else 1


def log_name(path: Path) -> str:
    """Return `rollout/0#2` for the log file `rollout-0-2.log`."""
    actor, _, incarnation = path.stem.rpartition("-")
    role, dash, replica = actor.rpartition("-")
    name = f"{role}/{replica}" if dash and replica.isdecimal() else actor
    return f"{name}#{incarnation}"


def _state(folder: RunFolder) -> RunState:
    state = RunState()
    for event in read_events(folder.events)[0]:
        state.apply(event)
    return state


def _as_dict(state: RunState, folder: RunFolder) -> dict[str, object]:
    holder = folder.holder() if _is_running(folder) else None
    head = {"running": holder is not None, "head_pid": holder.pid if holder else None}
    return head | dataclasses.asdict(state)


def _is_running(folder: RunFolder) -> bool:
    holder = folder.holder()
    return holder is not None and holder.is_alive


def _liveness(state: RunState, folder: RunFolder) -> str:
    holder = folder.holder()
    if holder is not None and holder.is_alive:
        return f"running: {holder}"
    if state.ended is None:
        return f"the head is gone without a word ({holder or 'it never took the lock'})"
    return f"ended with exit code {state.ended.get('exit_code')}: {clean(state.ended.get('reason'))}"


def _log_files(folder: RunFolder, actor: str) -> list[Path]:
    def wanted(path: Path) -> bool:
        name = log_name(path).rpartition("#")[0]
        return not actor or actor in {name, name.replace("/", "-"), name.partition("/")[0]}

    return sorted(filter(wanted, folder.logs.glob("*-*.log")), key=_log_order)


def _log_order(path: Path) -> tuple[str, int]:
    actor, _, incarnation = path.stem.rpartition("-")
    return actor, int(incarnation) if incarnation.isdecimal() else 0


def _known_actors(folder: RunFolder) -> str:
    names = sorted({log_name(path).rpartition("#")[0] for path in folder.logs.glob("*-*.log")})
    return f"there are {', '.join(names)}" if names else "no actor has been started yet"


class _Tail:
    """The lines of a growing file, from the `last` ones on or, with None, from the first."""

    def __init__(self, path: Path, last: int | None) -> None:
        self._path, self._last, self._offset, self._rest = path, last, 0, b""

    def lines(self) -> Iterator[str]:
        """Yield what was written since the last call; a line without its end waits for it."""
        with self._path.open("rb") as file:
            if self._last is not None:
                size = file.seek(0, os.SEEK_END)
                self._offset = max(0, size - self._last * _TAIL_BYTES_A_LINE)
            file.seek(self._offset)
            data = self._rest + file.read()
            self._offset = file.tell()
        *whole, self._rest = data.split(b"\n")
        last, self._last = self._last, None
        for line in whole if last is None else deque(whole, last):
            yield line.decode("utf-8", "backslashreplace")


def _signal_and_wait(holder: LockHolder, *, times: int, timeout_s: float | None) -> bool:
    """Signal exactly that process, through a pidfd, which cannot name another one."""
    try:
        pidfd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return True
    try:
        if not holder.is_alive:  # the pid was given to another process before it was opened
            return True
        return _until_gone(pidfd, lambda: signal.pidfd_send_signal(pidfd, signal.SIGTERM), times, timeout_s)
    finally:
        os.close(pidfd)


def _until_gone(pidfd: int, send: Callable[[], None], times: int, timeout_s: float | None) -> bool:
    for _ in range(times - 1):  # pending signals of one number merge, so each must be taken before the next
        send()
        if _is_gone(pidfd, POLL_S):
            return True
    send()
    return _is_gone(pidfd, timeout_s)


def _is_gone(pidfd: int, timeout_s: float | None) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])
