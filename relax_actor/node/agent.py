"""The node agent: starts actors, watches them by pidfd, kills and reaps whole process groups.

It decides nothing. Its standard input ties it to the head: end of file (or the head's death, seen by pidfd,
or a lease that could not be renewed) makes it kill everything, sweep the run's shared memory and leave. Its
parent, the keeper, does so in its place where it cannot. Actors are its children (see `zygote`), so that
their exit status is its own to read and no pid is reused before it has looked.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from relax_actor.actor.wire import (
    AgentReady,
    Exited,
    Kill,
    NodeConfig,
    Record,
    Renewed,
    Shutdown,
    Spawn,
    Spawned,
)
from relax_actor.node import process, zygote
from relax_actor.node.line import Line
from relax_actor.node.renewal import LeaseEnd, Renewal
from relax_actor.node.zygote import SAVED, THREAD_VARIABLES
from transport.address import Address
from transport.control import Frames
from transport.security import CurveKeys
from transport.shm import ShmSpace
from transport.zmq_control import ZmqNetwork

POLL_S = 0.002
GROUP_DEADLINE_S = 30.0


def identity(host: str, incarnation: int) -> bytes:
    """Return by which name an agent is known to the head's network."""
    return f"agent:{host}#{incarnation}".encode()


def main(config: NodeConfig, until: LeaseEnd, head: int) -> int:
    """Serve until the lease ends; return the exit code.

    Args:
        config: what the host's processes have in common.
        until: where the keeper looks for the end of the lease.
        head: pidfd of the head, or -1 where it is on another host.
    """
    process.become_subreaper()
    return asyncio.run(Agent(config, until, head).serve())


class _Child(msgspec.Struct, eq=False):
    name: str
    incarnation: int
    pid: int
    pidfd: int
    crash: str
    dead_since: float = 0.0
    code: int | None = None
    signal: int | None = None


class Agent:
    """One host's share of the tree."""

    def __init__(self, config: NodeConfig, until: LeaseEnd, head: int) -> None:
        self._config, self._until, self._head_pidfd = config, until, head
        self._space = ShmSpace(config.run_id, config.shm_root)
        self._children: dict[tuple[str, int], _Child] = {}
        self._zygotes: dict[str, _Zygote] = {}
        self._ended = asyncio.Event()
        self._runs_on = True  # whether the head may start another agent here
        self._line: Line
        self._renewal: Renewal
        self._loop: asyncio.AbstractEventLoop

    async def serve(self) -> int:
        """Carry out commands until told to end or until the lease is over; return the exit code."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self._ended.set)
        self._watch_head()
        config = self._config
        network = ZmqNetwork(keys=CurveKeys.from_bytes(config.keys) if config.keys else None)
        name = identity(config.host, config.agent_incarnation)
        channel = network.connect(Address.parse(config.head), self._heard, identity=name)
        self._line = Line(config.epoch, config.agent_incarnation, channel.send)
        renewal = Renewal(config, self._until, self._line, self._ended)
        self._renewal = renewal
        error = self._start_zygotes()
        if error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201 - the agent's log
        else:
            self._say(AgentReady(pid=os.getpid(), socket_dir=config.socket_dir))
            renewal.start(self._loop)
            await self._ended.wait()
        await self._clean_up()
        network.close()
        return 1 if error else 0

    def _watch_head(self) -> None:
        for fd in filter(lambda fd: fd >= 0, (sys.stdin.fileno(), self._head_pidfd)):
            self._loop.add_reader(fd, self._head_is_gone)

    def _head_is_gone(self) -> None:
        self._runs_on = False
        self._ended.set()

    def _start_zygotes(self) -> str:
        self._zygotes = {
            name: _Zygote(self._config, modules) for name, modules in self._config.zygotes.items()
        }
        return "\n".join(filter(None, (each.await_ready() for each in self._zygotes.values())))

    # -- commands -------------------------------------------------------------------------------

    def _heard(self, frames: Frames) -> None:
        message = self._line.receive(frames)
        if message is None:
            return
        record, arguments = message
        if isinstance(record, Spawn):
            self._spawn(record, arguments)
        elif isinstance(record, Kill):
            self._kill(record)
        elif isinstance(record, Renewed):
            self._renewal.granted(record.number)
        elif isinstance(record, Shutdown):
            self._head_is_gone()

    def _spawn(self, spawn: Spawn, arguments: Frames) -> None:
        pid, error = self._zygotes[spawn.zygote].fork(spawn, arguments)
        if self._zygotes[spawn.zygote].is_gone:
            pid, error = self._fork_from_a_new_zygote(spawn, arguments)
        if error:
            self._say(Exited(name=spawn.name, incarnation=spawn.incarnation, error=error))
            return
        child = _Child(spawn.name, spawn.incarnation, pid, os.pidfd_open(pid), spawn.crash)
        self._children[spawn.name, spawn.incarnation] = child
        self._loop.add_reader(child.pidfd, self._died, child)
        self._say(Spawned(name=spawn.name, incarnation=spawn.incarnation, pid=pid))

    def _fork_from_a_new_zygote(self, spawn: Spawn, arguments: Frames) -> tuple[int, str]:
        """Replace a dead zygote; the agent is busy while it imports, and deaths are told a little later."""
        self._zygotes[spawn.zygote].close()
        fresh = _Zygote(self._config, self._config.zygotes[spawn.zygote])
        self._zygotes[spawn.zygote] = fresh
        error = fresh.await_ready()
        return (0, error) if error else fresh.fork(spawn, arguments)

    def _kill(self, kill: Kill) -> None:
        child = self._children.get((kill.name, kill.incarnation))
        if child is not None:
            process.kill_group(child.pid)

    # -- deaths ---------------------------------------------------------------------------------

    def _died(self, child: _Child) -> None:
        self._loop.remove_reader(child.pidfd)
        os.close(child.pidfd)
        child.dead_since = time.monotonic()
        child.code, child.signal = process.exit_of(child.pid) or (None, None)
        self._sweep(child)

    def _sweep(self, child: _Child) -> None:
        """Kill what the dead actor left; report it gone only when nothing of it is left."""
        process.kill_group(child.pid)  # before the leader is reaped: its group id is still ours
        process.reap_group(child.pid)
        late = time.monotonic() - child.dead_since > GROUP_DEADLINE_S
        if process.kill_group(child.pid) and not late:
            self._loop.call_later(POLL_S, self._sweep, child)
            return
        self._space.sweep(child.name, child.incarnation)
        del self._children[child.name, child.incarnation]
        error = f"its process group {child.pid} did not end in {GROUP_DEADLINE_S:g} s" if late else ""
        self._say(
            Exited(
                name=child.name,
                incarnation=child.incarnation,
                code=child.code,
                signal=child.signal,
                error=error or _crash_text(child.crash),
            )
        )

    async def _clean_up(self) -> None:
        for child in self._children.values():
            process.kill_group(child.pid)
        deadline = time.monotonic() + GROUP_DEADLINE_S
        while self._children and time.monotonic() < deadline:  # noqa: ASYNC110 - emptied by _sweep's timers
            await asyncio.sleep(POLL_S)
        for each in self._zygotes.values():
            each.close()
        self._space.sweep()
        if self._config.is_remote or not self._runs_on:  # else the head's own socket is in it
            shutil.rmtree(self._config.socket_dir, ignore_errors=True)

    def _say(self, record: Record) -> None:
        self._line.say(record)


class _Zygote:
    """The agent's end of one zygote."""

    def __init__(self, config: NodeConfig, modules: tuple[str, ...]) -> None:
        self.is_gone = False  # as far as was noticed: it is asked only when something is to be forked
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", zygote.__name__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_single_threaded_environment(),
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(msgspec.msgpack.encode(config))
        self._connection.send_bytes(msgspec.msgpack.encode(modules))

    def await_ready(self) -> str:
        """Return what went wrong while it imported, or nothing."""
        return self._ask(lambda: msgspec.msgpack.decode(self._connection.recv_bytes(), type=str))

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


def _crash_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="backslashreplace")
    except OSError:
        return ""
