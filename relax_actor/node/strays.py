"""Processes that an actor started and that left its process group: found by its mark, ended with it.

An actor's children inherit its mark in one of two ways: those that were exec'ed carry the environment
variable `RELAX_ACTOR_MARK`, those that were only forked still map its status page. When the actor is dead the
kernel gives its orphans to the node agent, a subreaper, so that looking among the agent's own children is
enough and no pid can be reused in between. Nothing is ever judged by its name or its ancestry.

Looking costs a walk through /proc; where the actor was in a control group (see `cgroup`), that does the work.
"""

import os
import signal
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from relax_actor.node import process

VARIABLE = "RELAX_ACTOR_MARK"
AGENT_VARIABLE = "RELAX_ACTOR_AGENT"
"""Pid of the node agent that started the actor: two agents of a run may share a host."""


def mark_of(run_id: str, name: str, incarnation: int) -> str:
    """Return what an actor's environment says of whose it is."""
    return f"{run_id}/{name}/{incarnation}"


def kill_strays(mark: str, page_name: str, known: Container[int]) -> list[int]:
    """SIGKILL and reap this process' children that bear an actor's mark.

    Args:
        mark: `mark_of` the actor.
        page_name: name of the segment of its status page.
        known: pids that are no strays, whatever they bear: actors and zygotes.

    Returns:
        The pids found; empty once nothing of the actor is left among the children.
    """
    found = []
    for pid, is_dead in process.children():
        if pid in known:
            continue
        if is_dead:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        elif _bears(pid, mark, page_name):
            found.append(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return found


def kill_orphans(run_id: str, agent: int | None = None) -> list[int]:
    """SIGKILL what the actors of a dead agent, or of a dead run, left behind; return the pids.

    Only processes that were exec'ed can be told, and only one's own user's can be looked at.
    """
    run = f"{VARIABLE}={run_id}/".encode()
    ours = f"{AGENT_VARIABLE}={agent}".encode() if agent is not None else None
    return [pid for pid in process.everybody() if _kill_if(pid, run, ours)]


def _kill_if(pid: int, run: bytes, ours: bytes | None) -> bool:
    try:
        pidfd = os.pidfd_open(pid)  # first: what is looked at and what is killed are then the same process
    except OSError:
        return False
    try:
        marks = _read(pid, "environ").split(b"\0")
        is_run = any(mark.startswith(run) for mark in marks)
        is_ours = is_run and (ours is None or ours in marks)
        if is_ours:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return is_ours
    finally:
        os.close(pidfd)


def _bears(pid: int, mark: str, page_name: str) -> bool:
    return bears_mark(pid, mark) or page_name in _read(pid, "maps").decode("utf-8", "replace")


def bears_mark(pid: int, mark: str) -> bool:
    """Whether a process was exec'ed with an actor's mark in its environment."""
    return f"{VARIABLE}={mark}".encode() in _read(pid, "environ").split(b"\0")


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # it is gone, or another user's: not ours
        return b""
