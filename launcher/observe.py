"""`relax-actor status` and `stop`: where a run stands, and its end, from another terminal."""

import dataclasses
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import TextIO

from launcher.console import Display, render
from launcher.errors import RunFolderError
from launcher.runfolder import LockHolder, RunFolder
from launcher.runstate import RunState
from launcher.wording import clean
from relax_actor.telemetry import read_events

POLL_S = 0.2

STOP = (signal.SIGTERM,)
KILL = (signal.SIGTERM, signal.SIGINT)
"""Of two numbers: the kernel merges signals of one that nobody has taken yet, and a second SIGTERM is taken
for an echo of the first (see `interrupts`)."""


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
    gone = _signal_and_wait(holder, KILL if kill else STOP, timeout_s=timeout_s)
    out.write(f"{'stopped' if gone else 'still stopping'}: {holder}\n")
    return 0 if gone else 1


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


def _signal_and_wait(
    holder: LockHolder, numbers: Sequence[signal.Signals], *, timeout_s: float | None
) -> bool:
    """Signal exactly that process, through a pidfd, which cannot name another one."""
    try:
        pidfd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return True
    try:
        if not holder.is_alive:  # the pid was given to another process before it was opened
            return True
        return _until_gone(pidfd, numbers, timeout_s)
    except ProcessLookupError:  # it has ended meanwhile, and somebody has waited for it
        return True
    finally:
        os.close(pidfd)


def _until_gone(pidfd: int, numbers: Sequence[signal.Signals], timeout_s: float | None) -> bool:
    *first, last = numbers
    for number in first:
        signal.pidfd_send_signal(pidfd, number)
        if _is_gone(pidfd, POLL_S):
            return True
    signal.pidfd_send_signal(pidfd, last)
    return _is_gone(pidfd, timeout_s)


def _is_gone(pidfd: int, timeout_s: float | None) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])
