"""`relax-actor stack`: what every thread of an actor is doing, asked of the process itself.

SIGUSR1 makes an actor append its stacks to its own log, from a signal handler written in C: it needs
neither the head nor the actor's cooperation, and works while Python code holds the GIL. On another host its
node agent sends the signal, asked through the head.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TextIO

import msgspec

from launcher.errors import RunFolderError
from launcher.lives import ALIVE, Life
from launcher.view import RunView
from launcher.wording import clean
from relax_actor.node.facts import Handling, ProcessFacts, catches
from relax_actor.stacks import ThreadStack, is_dump_line, parse_dump

POLL_S = 0.02


def stack(view: RunView, out: TextIO, word: str, *, timeout_s: float = 5.0, as_json: bool = False) -> None:
    """Print the Python stacks of all threads of a running actor.

    Args:
        view: of the run.
        out: where to.
        word: the actor.
        timeout_s: how long to wait for the dump.
        as_json: print a JSON array of threads.

    Raises:
        RunFolderError: it does not run here, has no handler yet, or did not answer.
    """
    life, facts = _running(view, word)
    if facts.is_stopped:
        fact = f"`{life}` (pid {life.pid}) is stopped by a signal and cannot say where it is"
        raise RunFolderError(fact, f"kill -CONT {life.pid}; or --native, which needs no help from it")
    if not _takes_dumps(view, life):
        fact = f"`{life}` (pid {life.pid}) has no handler for SIGUSR1, which would kill it"
        raise RunFolderError(
            fact, "it is only just starting, or its code took the handler away; try --native"
        )
    lines = _dumped(life, timeout_s) if view.is_near(life) else _dumped_there(view, life)
    threads = parse_dump(lines)
    if as_json:
        out.write(msgspec.json.encode(threads).decode() + "\n")
    else:
        out.writelines(f"{line}\n" for line in _told(life, threads))


def native_stack(view: RunView, out: TextIO, word: str) -> None:
    """Print the stacks of Python and native code, by py-spy.

    Raises:
        RunFolderError: there is no py-spy, or it failed.
    """
    life, _ = _running(view, word)
    if not view.is_near(life):
        raise RunFolderError(f"`{life}` runs on {life.host}, and py-spy looks at this host only")
    program = shutil.which("py-spy")
    if program is None:
        raise RunFolderError("`py-spy` is not installed", "pip install py-spy; or leave out --native")
    command = [program, "dump", "--native", "--pid", str(life.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise RunFolderError(f"py-spy failed: {clean(last)}", "it needs the right to trace: run as root")
    out.write(done.stdout)


def _running(view: RunView, word: str) -> tuple[Life, ProcessFacts]:
    name, incarnation = view.actor(word)
    last = view.lives.last(name)
    life = last if incarnation is None else view.lives.life(name, incarnation)
    facts = view.process(life) if life else None
    if life is None or facts is None:
        if life is not None and life.phase in ALIVE and view.sight(life) is None:
            fact = f"`{life}` runs on {life.host}, out of sight: the head is elsewhere or does not answer"
            raise RunFolderError(fact, f"run this command on {life.host}")
        where = f" on {os.uname().nodename}" if not view.is_here else ""
        raise RunFolderError(f"`{word}` does not run{where}", f"relax-actor why {view.folder.path} {word}")
    return life, facts


def _takes_dumps(view: RunView, life: Life) -> bool:
    if view.is_near(life):
        return catches(life.pid, signal.SIGUSR1)
    sight = view.sight(life)
    return sight is not None and sight.takes_dumps


def _dumped_there(view: RunView, life: Life) -> list[str]:
    """Have the node agent of another host ask for a dump.

    Raises:
        RunFolderError: nothing came.
    """
    sight = view.distant(life, wants_stacks=True)
    if sight is None or not sight.dump:
        raise RunFolderError(f"`{life}` (pid {life.pid} on {life.host}) did not dump its stacks in time")
    return list(sight.dump)


def _dumped(life: Life, timeout_s: float) -> list[str]:
    """Ask for a dump and return its lines.

    Raises:
        RunFolderError: nothing came in time.
    """
    log = Path(life.log)
    before, handling = log.stat().st_size, Handling(life.pid, signal.SIGUSR1)
    pidfd = os.pidfd_open(life.pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
    finally:
        os.close(pidfd)
    lines = _whole_dump(log, before, handling, time.monotonic() + timeout_s)
    if not lines:
        fact = f"`{life}` (pid {life.pid}) did not dump its stacks within {timeout_s:g} s"
        raise RunFolderError(fact, "it is in the kernel and takes no signal (state D), or its log is full")
    return lines


def _whole_dump(log: Path, before: int, handling: Handling, deadline: float) -> list[str]:
    """Return what was dumped after `before` bytes: all of it, unless that took until the deadline."""
    lines: list[str] = []
    is_over = False
    while time.monotonic() < deadline and not (lines and is_over):
        time.sleep(POLL_S)
        is_over = handling.is_over  # before it is read: then all is there
        lines = _new_lines(log, before)
    return lines


def _new_lines(log: Path, offset: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(offset)
        text = file.read().decode("utf-8", "backslashreplace")
    return [line for line in text.splitlines() if is_dump_line(line)]


def _told(life: Life, threads: list[ThreadStack]) -> list[str]:
    lines = [f"{life} (pid {life.pid}), innermost call first; the dump is in {life.log}"]
    for thread in sorted(threads, key=lambda thread: not thread.is_current):
        mark = ", the main one" if thread.is_current else ""  # the kernel gives it signals first
        lines += ["", f"thread {thread.ident}{mark}", *map(clean, thread.frames)]
    return lines
