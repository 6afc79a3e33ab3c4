"""The agent's ends of its zygotes, and who waits to be forked.

A zygote that died is replaced when it is next needed. Importing may take longer than a lease lasts, so
nobody waits for it but those who are to be forked by it: the agent goes on meanwhile.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from relax_actor.actor.wire import NodeConfig, Spawn
from relax_actor.node import zygote
from relax_actor.node.zygote import SAVED, THREAD_VARIABLES
from transport.control import Frames

Born = Callable[[int, str], None]
"""Takes the pid and no error, or 0 and the error."""


class Nursery:
    """All zygotes of a node agent. Every method runs in its loop thread.

    Args:
        config: names the zygotes.
        pipe: read end of the agent's death pipe.
        loop: the agent's.
    """

    def __init__(self, config: NodeConfig, pipe: int, loop: asyncio.AbstractEventLoop) -> None:
        self._config, self._pipe, self._loop = config, pipe, loop
        self._zygotes: dict[str, _Zygote] = {}
        self._waiting: dict[str, list[tuple[Spawn, Frames, Born]]] = {}  # for a zygote that imports

    @property
    def pids(self) -> set[int]:
        """The zygotes' pids."""
        return {each.pid for each in self._zygotes.values()}

    def start(self) -> str:
        """Start all of them, and wait; return what went wrong, or nothing."""
        for name in self._config.zygotes:
            self._start(name)
        return "\n".join(filter(None, (each.await_ready() for each in self._zygotes.values())))

    def fork(self, spawn: Spawn, arguments: Frames, born: Born) -> None:
        """Fork an actor: now, or when the zygote has imported what it needs."""
        name = spawn.zygote
        if name not in self._zygotes:
            born(0, f"there is no zygote {name!r}")
            return
        if name not in self._waiting:
            pid, error = self._zygotes[name].fork(spawn, arguments)
            if not self._zygotes[name].is_gone:
                born(pid, error)
                return
            self._replace(name)
        self._waiting[name].append((spawn, arguments, born))

    def cancel(self, name: str, incarnation: int) -> None:
        """Do not fork who still waits for it."""
        for waiting in self._waiting.values():
            for each in tuple(waiting):
                spawn, _, born = each
                if (spawn.name, spawn.incarnation) == (name, incarnation):
                    waiting.remove(each)
                    born(0, "it was killed before it was started")

    def close(self) -> None:
        """End all of them, and reap them."""
        for name in self._waiting:
            self._loop.remove_reader(self._zygotes[name].fileno())
        for each in self._zygotes.values():
            each.close()

    def _start(self, name: str) -> "_Zygote":
        self._zygotes[name] = _Zygote(self._config, self._config.zygotes[name], self._pipe)
        return self._zygotes[name]

    def _replace(self, name: str) -> None:
        self._zygotes[name].close()
        self._waiting[name] = []
        self._loop.add_reader(self._start(name).fileno(), self._is_ready, name)

    def _is_ready(self, name: str) -> None:
        """Fork those who waited; the zygote has said that it is ready, or ended."""
        self._loop.remove_reader(self._zygotes[name].fileno())
        error = self._zygotes[name].await_ready()
        for spawn, arguments, born in self._waiting.pop(name):
            if error:
                born(0, error)
            else:
                self.fork(spawn, arguments, born)


class _Zygote:
    """The agent's end of one zygote."""

    def __init__(self, config: NodeConfig, modules: tuple[str, ...], pipe: int) -> None:
        self.is_gone = False  # as far as was noticed: it is asked only when something is to be forked
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    zygote.__name__,
                    *map(str, (theirs.fileno(), os.getpid(), pipe)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), pipe),
                env=_single_threaded_environment(),
            )
        self.pid = self._process.pid
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(msgspec.msgpack.encode(config))
        self._connection.send_bytes(msgspec.msgpack.encode(modules))

    def await_ready(self) -> str:
        """Return what went wrong while it imported, or nothing."""
        return self._ask(lambda: msgspec.msgpack.decode(self._connection.recv_bytes(), type=str))

    def fileno(self) -> int:
        """Return a descriptor that is readable once it is ready, or has ended."""
        return self._connection.fileno()

    def fork(self, spawn: Spawn, arguments: Frames) -> tuple[int, str]:
        """Fork an actor; return its pid and no error, or 0 and the error."""
        request = [msgspec.msgpack.encode(spawn), *map(bytes, arguments)]
        answer: tuple[int, str] = (0, "")

        def ask() -> str:
            nonlocal answer
            self._connection.send_bytes(msgspec.msgpack.encode(request))
            answer = msgspec.msgpack.decode(self._connection.recv_bytes(), type=tuple[int, str])
            return answer[1]

        error = self._ask(ask)
        return (0, error) if error else answer

    def close(self) -> None:
        """End it and reap it."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, question: Callable[[], str]) -> str:
        try:
            return question()
        except (EOFError, OSError) as error:
            self.is_gone = True
            code = self._process.poll()
            return f"the zygote ended (exit code {code}): {type(error).__name__}"


def _single_threaded_environment() -> dict[str, str]:
    env = dict(os.environ)
    for name in THREAD_VARIABLES:
        if name in env:
            env[SAVED + name] = env[name]
        env[name] = "1"
    return env
