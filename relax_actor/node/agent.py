"""The node agent: starts actors, watches them, kills and reaps everything that they have started.

A death is told twice: `Dying` at once, by the robust mutex in the actor's status page, and `Exited` when the
kernel says (pidfd) that the process is gone and nothing of it is left: no member of its process group or control
group, no stray that bears its mark, no segment, no memory of its devices.

It decides nothing. Its standard input is its lease: the first frame says what the host's processes have in
common, and end of file (or the head's death, seen by pidfd) makes it kill everything, sweep the run's
shared memory and leave. Actors are its children (see `zygote`), so that their exit status is its own to read
and no pid is reused before it has looked.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from relax_actor.actor import page, wire
from relax_actor.actor.page import PageState, PageView
from relax_actor.actor.wire import (
    AgentReady,
    Exited,
    Kill,
    NodeConfig,
    Record,
    Shutdown,
    Spawn,
    Spawned,
)
from relax_actor.node import cgroup, exec, process, strays, zygote  # noqa: A004 - what the module does
from relax_actor.node.devices import RELEASE_DEADLINE_S, DeviceGate, await_release
from relax_actor.node.dump import dump_stacks
from relax_actor.node.watch import DeathWatch
from relax_actor.node.zygote import SAVED, THREAD_VARIABLES
from transport import codec
from transport.address import Address
from transport.control import Frames
from transport.segment import SegmentError
from transport.shm import ShmSpace
from transport.zmq_control import ZmqNetwork

POLL_S = 0.002
GROUP_DEADLINE_S = 30.0
IDENTITY = b"agent"


def main() -> None:
    """Read the lease's first frame and serve until the lease ends."""
    length = int.from_bytes(sys.stdin.buffer.read(4), "little")
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=NodeConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.become_subreaper()
    asyncio.run(Agent(config).serve())


class _Child(msgspec.Struct, eq=False):
    spawn: Spawn
    pid: int
    pidfd: int
    watch: DeathWatch
    is_dying: bool = False
    is_killed: bool = False  # by us
    dead_since: float = 0.0
    code: int | None = None
    signal: int | None = None


class Agent:
    """One host's share of the tree."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._space = ShmSpace(config.run_id, config.shm_root)
        self._children: dict[tuple[str, int], _Child] = {}
        self._zygotes: dict[str, _Zygote] = {}
        self._pipe, self._pipe_end = os.pipe()  # the write end closes with this process alone
        self._cgroups = cgroup.Cgroups(cgroup.root(config.run_id))
        self._oom = cgroup.OomWatch()
        self._gate: DeviceGate | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop

    async def serve(self) -> None:
        """Carry out commands until told to end or until the lease is over."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self._ended.set)
        self._watch_lease()
        network = ZmqNetwork()
        self._head = network.connect(Address.parse(self._config.head), self._heard, identity=IDENTITY)
        error = self._start_zygotes()
        if error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201 - the agent's log
        else:
            self._say(AgentReady(pid=os.getpid()))
            await self._ended.wait()
        await self._clean_up()
        network.close()

    def _watch_lease(self) -> None:
        self._loop.add_reader(sys.stdin.fileno(), self._ended.set)
        if os.getppid() == self._config.head_pid:
            self._loop.add_reader(os.pidfd_open(self._config.head_pid), self._ended.set)

    def _start_zygotes(self) -> str:
        self._zygotes = {
            name: _Zygote(self._config, modules, self._pipe) for name, modules in self._config.zygotes.items()
        }
        return "\n".join(filter(None, (each.await_ready() for each in self._zygotes.values())))

    # -- commands -------------------------------------------------------------------------------

    def _heard(self, frames: Frames) -> None:
        record = wire.decode(frames[0])
        if isinstance(record, Spawn):
            self._spawn(record, frames[1:])
        elif isinstance(record, Kill):
            self._kill(record)
        elif isinstance(record, Shutdown):
            self._ended.set()

    def _spawn(self, spawn: Spawn, arguments: Frames) -> None:
        spawn = msgspec.structs.replace(spawn, cgroup=self._cgroups.make(spawn.name, spawn.incarnation))
        try:
            segment = page.create(self._space, spawn.name, spawn.incarnation)
        except SegmentError as error:
            self._refuse(spawn, str(error))
            return
        pid, error = self._start(spawn, arguments)
        if error:
            self._refuse(spawn, error)
            return
        key = spawn.name, spawn.incarnation
        watch = DeathWatch(segment, lambda: self._loop.call_soon_threadsafe(self._dying, key))
        child = _Child(spawn, pid, os.pidfd_open(pid), watch)
        self._children[key] = child
        self._loop.add_reader(child.pidfd, self._died, child)
        self._say(Spawned(name=spawn.name, incarnation=spawn.incarnation, pid=pid))

    def _start(self, spawn: Spawn, arguments: Frames) -> tuple[int, str]:
        if spawn.python or not spawn.zygote:
            return exec.start(self._config, spawn, arguments, pipe=self._pipe)
        if spawn.zygote not in self._zygotes:
            return 0, f"there is no zygote {spawn.zygote!r}"
        return self._zygotes[spawn.zygote].fork(spawn, arguments)

    def _refuse(self, spawn: Spawn, error: str) -> None:
        self._cgroups.end(spawn.name, spawn.incarnation)
        self._space.sweep(spawn.name, spawn.incarnation)
        self._say(Exited(name=spawn.name, incarnation=spawn.incarnation, error=error))

    def _kill(self, kill: Kill) -> None:
        child = self._children.get((kill.name, kill.incarnation))
        if child is None:
            return
        seen = PageView.read(self._space, kill.name, kill.incarnation)
        if child.is_killed or child.is_dying or seen is None or seen.state == PageState.UNBORN.name:
            child.is_killed = True
            process.kill_group(child.pid)
        else:
            child.is_killed = True
            self._run(self._dump_and_kill(child))

    async def _dump_and_kill(self, child: _Child) -> None:
        await dump_stacks(child.pid, Path(child.spawn.log))
        if (child.spawn.name, child.spawn.incarnation) in self._children:
            process.kill_group(child.pid)

    def _run(self, task: Coroutine[Any, Any, None]) -> None:
        running = self._loop.create_task(task)
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)

    # -- deaths ---------------------------------------------------------------------------------

    def _dying(self, key: tuple[str, int]) -> None:
        """Tell the head, once, that an actor takes no more calls, and what its page says of them."""
        child = self._children.get(key)
        if child is None or child.is_dying:
            return
        child.is_dying = True
        reason = process.ending_of(child.pid) or "it is ending"
        self._say(page.dying(*key, reason, PageView.read(self._space, *key)))

    def _died(self, child: _Child) -> None:
        self._loop.remove_reader(child.pidfd)
        os.close(child.pidfd)
        child.watch.end()
        self._dying((child.spawn.name, child.spawn.incarnation))
        child.dead_since = time.monotonic()
        child.code, child.signal = process.exit_of(child.pid) or (None, None)
        if child.code != 0:
            self._keep_page(child.spawn)
        self._sweep(child)

    def _keep_page(self, spawn: Spawn) -> None:
        record = PageView.read(self._space, spawn.name, spawn.incarnation)
        if record is not None:
            with suppress(OSError):
                Path(spawn.crash).with_suffix(".json").write_bytes(msgspec.json.encode(record))

    def _sweep(self, child: _Child) -> None:
        """Kill what the dead actor left; go on only when nothing of it is left."""
        is_late = time.monotonic() - child.dead_since > GROUP_DEADLINE_S
        if self._is_anything_left(child) and not is_late:
            self._loop.call_later(POLL_S, self._sweep, child)
            return
        error = f"its process group {child.pid} did not end in {GROUP_DEADLINE_S:g} s" if is_late else ""
        if child.spawn.devices:
            self._run(self._release(child, error))
        else:
            self._gone(child, error)

    def _is_anything_left(self, child: _Child) -> bool:
        spawn = child.spawn
        process.kill_group(child.pid)  # before the leader is reaped: its group id is still ours
        process.reap_group(child.pid)
        known = {each.pid for each in self._children.values()} | {each.pid for each in self._zygotes.values()}
        mark = strays.mark_of(self._config.run_id, spawn.name, spawn.incarnation)
        page_name = self._space.name(spawn.name, spawn.incarnation, page.LABEL)
        found = strays.kill_strays(mark, page_name, known)
        is_group_empty = not process.kill_group(child.pid)
        return bool(found) or not self._cgroups.end(spawn.name, spawn.incarnation) or not is_group_empty

    async def _release(self, child: _Child, error: str) -> None:
        """Wait until the memory of the dead actor's devices is back."""
        if self._gate is None:
            self._gate = await asyncio.to_thread(DeviceGate.of_this_host)
        mark = strays.mark_of(self._config.run_id, child.spawn.name, child.spawn.incarnation)
        held = await await_release(
            self._gate,
            child.spawn.devices,
            lambda pid: pid == child.pid or strays.bears_mark(pid, mark),
            RELEASE_DEADLINE_S,
        )
        self._gone(child, error, held)

    def _gone(self, child: _Child, error: str, held: str = "") -> None:
        spawn = child.spawn
        self._space.sweep(spawn.name, spawn.incarnation)
        del self._children[spawn.name, spawn.incarnation]
        self._say(
            Exited(
                name=spawn.name,
                incarnation=spawn.incarnation,
                code=child.code,
                signal=child.signal,
                error=error or _crash_text(spawn.crash),
                oom=self._oom_evidence(child),
                held=held,
            )
        )

    def _oom_evidence(self, child: _Child) -> str:
        if child.signal != signal.SIGKILL or child.is_killed:
            return ""
        return self._oom.evidence()

    async def _clean_up(self) -> None:
        for child in self._children.values():
            child.is_killed = True
            process.kill_group(child.pid)
        deadline = time.monotonic() + GROUP_DEADLINE_S
        while self._children and time.monotonic() < deadline:  # noqa: ASYNC110 - emptied by _sweep's timers
            await asyncio.sleep(POLL_S)
        for each in self._zygotes.values():
            each.close()
        self._cgroups.close()
        self._space.sweep()
        shutil.rmtree(self._config.socket_dir, ignore_errors=True)

    def _say(self, record: Record) -> None:
        self._head.send([codec.encode(record)])


class _Zygote:
    """The agent's end of one zygote."""

    def __init__(self, config: NodeConfig, modules: tuple[str, ...], pipe: int) -> None:
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


if __name__ == "__main__":
    main()
