"""The node agent: starts actors, watches them, kills and reaps everything that they have started.

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
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from relax_actor.actor.wire import (
    AgentReady,
    Exited,
    Kill,
    Look,
    NodeConfig,
    Promote,
    Record,
    Renewed,
    Shutdown,
    Spawn,
    Spawned,
)
from relax_actor.node import exec, process, zygote  # noqa: A004 - what the module does
from relax_actor.node.children import Children
from relax_actor.node.fuse import Fuse
from relax_actor.node.line import Line
from relax_actor.node.names import agent_identity
from relax_actor.node.renewal import LeaseEnd, Renewal
from relax_actor.node.zygote import SAVED, THREAD_VARIABLES
from relax_actor.telemetry import EventLog
from transport.address import Address
from transport.control import Frames
from transport.security import CurveKeys
from transport.shm import ShmSpace
from transport.zmq_control import ZmqNetwork


def main(config: NodeConfig, until: LeaseEnd, head: int) -> int:
    """Serve until the lease ends; return the exit code.

    Args:
        config: what the host's processes have in common.
        until: where the keeper looks for the end of the lease.
        head: pidfd of the head, or -1 where it is on another host.
    """
    process.become_subreaper()
    return asyncio.run(Agent(config, until, head).serve())


class Agent:
    """One host's share of the tree."""

    def __init__(self, config: NodeConfig, until: LeaseEnd, head: int) -> None:
        self._config, self._until, self._head_pidfd = config, until, head
        self._space = ShmSpace(config.run_id, config.shm_root)
        self._events = EventLog(Path(config.run_dir) / "events.jsonl", "agent", 1)
        self._zygotes: dict[str, _Zygote] = {}
        self._pipe, self._pipe_end = os.pipe()  # the write end closes with this process alone
        self._ended = asyncio.Event()
        self._fuse: Fuse | None = None
        self._runs_on = True  # whether the head may start another agent here
        self._line: Line
        self._renewal: Renewal
        self._reason = ""  # why it ends
        self._loop: asyncio.AbstractEventLoop

    async def serve(self) -> int:
        """Carry out commands until told to end or until the lease is over; return the exit code."""
        self._loop = asyncio.get_running_loop()
        self._children = Children(self._config, self._space, self._zygote_pids, self._say)
        self._fuse = _fuse()
        self._loop.add_signal_handler(signal.SIGTERM, self._end, "SIGTERM")
        self._watch_head()
        config = self._config
        network = ZmqNetwork(keys=CurveKeys.from_bytes(config.keys) if config.keys else None)
        name = agent_identity(config.host, config.agent_incarnation)
        channel = network.connect(Address.parse(config.head), self._heard, identity=name)
        self._line = Line(config.epoch, config.agent_incarnation, channel.send)
        renewal = Renewal(config, self._until, self._line, self._end, self._held)
        self._renewal = renewal
        error = self._start_zygotes()
        if error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201 - the agent's log
        else:
            node = os.uname().nodename
            self._say(AgentReady(pid=os.getpid(), socket_dir=config.socket_dir, node=node))
            renewal.start(self._loop)
            await self._ended.wait()
            self._events.emit("lease_ended", reason=self._reason)  # what still lives is killed for it
        await self._clean_up()
        network.close()
        return 1 if error else 0

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._ended.set()

    def _held(self, until_s: float) -> None:
        """Let those know until when the lease holds who must not outlive it: actors, and this process."""
        self._children.hold_until(until_s)
        if self._fuse is not None:
            self._fuse.light(until_s + self._config.lease.kernel_grace_s)

    def _watch_head(self) -> None:
        self._loop.add_reader(sys.stdin.fileno(), self._end_with_head, "its head let it go")
        if self._head_pidfd >= 0:
            self._loop.add_reader(self._head_pidfd, self._end_with_head, "its head is gone")

    def _end_with_head(self, reason: str) -> None:
        self._runs_on = False
        self._end(reason)

    def _start_zygotes(self) -> str:
        self._zygotes = {
            name: _Zygote(self._config, modules, self._pipe) for name, modules in self._config.zygotes.items()
        }
        return "\n".join(filter(None, (each.await_ready() for each in self._zygotes.values())))

    def _zygote_pids(self) -> set[int]:
        return {each.pid for each in self._zygotes.values()}

    # -- commands -------------------------------------------------------------------------------

    def _heard(self, frames: Frames) -> None:
        message = self._line.receive(frames)
        if message is None:
            return
        record, arguments = message
        if isinstance(record, Spawn):
            self._spawn(record, arguments)
        elif isinstance(record, Kill):
            self._children.kill(record.name, record.incarnation)
        elif isinstance(record, Renewed):
            self._renewal.granted(record.number)
        elif isinstance(record, Promote):
            self._children.promote(record)
        elif isinstance(record, Look):
            self._children.look(record, Path(self._config.run_dir))
        elif isinstance(record, Shutdown):
            self._end_with_head("its head told it to")

    def _spawn(self, spawn: Spawn, arguments: Frames) -> None:
        spawn, segment, error = self._children.prepare(spawn)
        if segment is None:
            self._children.refuse(spawn, error)
            return
        pid, error = self._start(spawn, arguments)
        if error:
            self._children.refuse(spawn, error)
            return
        self._children.add(spawn, pid, segment)
        since = process.start_time(pid)
        self._say(Spawned(name=spawn.name, incarnation=spawn.incarnation, pid=pid, start_ticks=since))

    def _start(self, spawn: Spawn, arguments: Frames) -> tuple[int, str]:
        if spawn.python or not spawn.zygote:
            return exec.start(self._config, spawn, arguments, pipe=self._pipe)
        if spawn.zygote not in self._zygotes:
            return 0, f"there is no zygote {spawn.zygote!r}"
        pid, error = self._zygotes[spawn.zygote].fork(spawn, arguments)
        if self._zygotes[spawn.zygote].is_gone:
            return self._fork_from_a_new_zygote(spawn, arguments)
        return pid, error

    def _fork_from_a_new_zygote(self, spawn: Spawn, arguments: Frames) -> tuple[int, str]:
        """Replace a dead zygote; the agent is busy while it imports, and deaths are told a little later."""
        self._zygotes[spawn.zygote].close()
        fresh = _Zygote(self._config, self._config.zygotes[spawn.zygote], self._pipe)
        self._zygotes[spawn.zygote] = fresh
        error = fresh.await_ready()
        return (0, error) if error else fresh.fork(spawn, arguments)

    async def _clean_up(self) -> None:
        await self._children.end()
        for each in self._zygotes.values():
            each.close()
        self._space.sweep()
        if self._config.is_remote or not self._runs_on:  # else the head's own socket is in it
            shutil.rmtree(self._config.socket_dir, ignore_errors=True)

    def _say(self, record: Record) -> None:
        if isinstance(record, Exited):  # the head says more, unless it is hung
            facts = {"code": record.code, "signal": record.signal, "oom": record.oom}
            self._events.emit("process_exited", child=record.name, incarnation=record.incarnation, **facts)
        self._line.say(record)


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


def _fuse() -> Fuse | None:
    try:
        return Fuse()
    except OSError as error:  # the keeper and the actors' own fences are still there
        print(f"no timer that outlives a stop: {error}", file=sys.stderr, flush=True)  # noqa: T201 - its log
        return None


def _single_threaded_environment() -> dict[str, str]:
    env = dict(os.environ)
    for name in THREAD_VARIABLES:
        if name in env:
            env[SAVED + name] = env[name]
        env[name] = "1"
    return env
