"""The node agent's end of its zygotes: how one is made, asked, heard and ended.

The first ones are forks of the agent before it has any thread, so that nothing is imported twice. One that
takes the place of a dead zygote is a fresh interpreter: by then the agent has threads.

Nobody waits for a zygote: it is asked, also while it still imports, and its answers come in order.
"""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from relax_actor.actor.wire import NodeConfig, Spawn
from relax_actor.node import preload, zygote
from relax_actor.node.preload import Imported
from transport.control import Frames


class Zygote:
    """One zygote.

    Args:
        pid: of its process, a child of this one.
        connection: our end of the socket to it.
        config: what the processes of the run have in common.
        modules: what it imports before it forks.
    """

    def __init__(self, pid: int, connection: Connection, config: NodeConfig, modules: Sequence[str]) -> None:
        self.pid = pid
        self._connection = connection
        for part in (config, modules):
            connection.send_bytes(msgspec.msgpack.encode(part))

    @classmethod
    def forked(cls, config: NodeConfig, modules: Sequence[str], pipe: int) -> "Zygote":
        """Make one of this process, which must have a single thread.

        Args:
            config: what the processes of the run have in common.
            modules: what it imports.
            pipe: read end of the death pipe.
        """
        agent = os.getpid()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _be_zygote(theirs.fileno(), agent, pipe)
        theirs.close()
        return cls(pid, Connection(ours.detach()), config, modules)

    @classmethod
    def executed(cls, config: NodeConfig, modules: Sequence[str], pipe: int) -> "Zygote":
        """Make one in an interpreter of its own; see `forked`."""
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (theirs.fileno(), pipe)]
            command = [sys.executable, "-P", "-m", zygote.__name__]
            pid = os.posix_spawn(
                sys.executable,
                [*command, *map(str, (theirs.fileno(), os.getpid(), pipe))],
                dict(os.environ) | preload.environment(),
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *inherited],
            )
        return cls(pid, Connection(ours.detach()), config, modules)

    def fileno(self) -> int:
        """Return a descriptor that is readable when it has answered or ended."""
        return self._connection.fileno()

    def ask(self, spawn: Spawn, arguments: Frames) -> None:
        """Have it fork an actor; `born` answers. One that has ended takes nothing."""
        request = [msgspec.msgpack.encode(spawn), *map(bytes, arguments)]
        with suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(request))

    def imported(self) -> Imported:
        """Wait until it has imported; return how that went.

        Raises:
            EOFError: it has ended.
        """
        return msgspec.msgpack.decode(self._receive(), type=Imported)

    def born(self) -> tuple[int, str]:
        """Return the pid of the actor asked for first and no error, or 0 and the error; waits for it.

        Raises:
            EOFError: it has ended.
        """
        return msgspec.msgpack.decode(self._receive(), type=tuple[int, str])

    @property
    def has_answered(self) -> bool:
        """Whether the next answer, or the news of its end, is here."""
        return self._connection.poll()

    def answers_within(self, timeout_s: float) -> bool:
        """Wait for the next answer, or the news of its end; return whether it has come."""
        return self._connection.poll(timeout_s)

    def close(self) -> str:
        """End it and reap it; return how it ended."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            return f"exit code {os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])}"
        return "already reaped"

    def _receive(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except OSError as error:
            raise EOFError(str(error)) from error


def _be_zygote(fd: int, agent: int, pipe: int) -> None:
    code = 1
    try:
        _keep_only(fd, pipe)
        os.environ.update(preload.environment())
        zygote.main(fd, agent, pipe)
        code = 0
    except BaseException:  # noqa: BLE001 - the fork must not return into the agent
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _keep_only(*kept: int) -> None:
    """Close what the agent has open but its log: the death pipe's write end must be the agent's alone."""
    os.dup2(null := os.open(os.devnull, os.O_RDONLY), 0)
    os.close(null)
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - names are enough
        if fd > 2 and fd not in kept:  # standard input, output and error stay
            with suppress(OSError):  # the listing's own
                os.close(fd)
