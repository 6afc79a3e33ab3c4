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
import sys
from collections.abc import Mapping
from pathlib import Path

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
)
from relax_actor.node import process
from relax_actor.node.children import Children
from relax_actor.node.fuse import Fuse
from relax_actor.node.line import Line
from relax_actor.node.names import agent_identity
from relax_actor.node.nursery import Nursery
from relax_actor.node.renewal import LeaseEnd, Renewal
from relax_actor.node.zygotes import Zygote
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
    pipe, _pipe_end = os.pipe()  # the write end closes with this process alone
    zygotes = {name: Zygote.forked(config, modules, pipe) for name, modules in config.zygotes.items()}
    return asyncio.run(Agent(config, until, head, zygotes, pipe).serve())


class Agent:
    """One host's share of the tree.

    Args:
        config: what the host's processes have in common.
        until: where the keeper looks for the end of the lease.
        head: pidfd of the head, or -1 where it is on another host.
        zygotes: forks of this process, by name.
        pipe: read end of the death pipe.
    """

    def __init__(
        self, config: NodeConfig, until: LeaseEnd, head: int, zygotes: Mapping[str, Zygote], pipe: int
    ) -> None:
        self._config, self._until, self._head_pidfd = config, until, head
        self._space = ShmSpace(config.run_id, config.shm_root)
        self._events = EventLog(Path(config.run_dir) / "events.jsonl", "agent", 1)
        self._zygotes, self._pipe = zygotes, pipe
        self._nursery: Nursery
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
        self._children = Children(self._config, self._space, lambda: self._nursery.pids, self._say)
        self._nursery = Nursery(
            self._config, self._zygotes, self._pipe, self._children, self._say, self._warn_of
        )
        self._fuse = _fuse()
        self._loop.add_signal_handler(signal.SIGTERM, self._told_to_end)
        self._watch_head()
        config = self._config
        network = ZmqNetwork(keys=CurveKeys.from_bytes(config.keys) if config.keys else None)
        name = agent_identity(config.host, config.agent_incarnation)
        channel = network.connect(Address.parse(config.head), self._heard, identity=name)
        self._line = Line(config.epoch, config.agent_incarnation, channel.send)
        renewal = Renewal(config, self._until, self._line, self._end, self._held)
        self._renewal = renewal
        error = self._nursery.open()
        if error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201 - the agent's log
        else:
            node = os.uname().nodename
            self._say(AgentReady(pid=os.getpid(), socket_dir=config.socket_dir, node=node))
            renewal.start(self._loop)
            await self._ended.wait()
            self._events.emit(
                "lease_ended", reason=self._reason, site=self._config.host
            )  # what still lives is killed for it
        await self._clean_up()
        network.close()
        return 1 if error else 0

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._ended.set()

    def _told_to_end(self) -> None:
        if not self._config.term_is_for_head:  # which else hears it too, and ends its actors in order
            self._end("SIGTERM")

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

    # -- commands -------------------------------------------------------------------------------

    def _heard(self, frames: Frames) -> None:
        message = self._line.receive(frames)
        if message is None:
            return
        record, arguments = message
        if isinstance(record, Spawn):
            self._nursery.order(record, arguments)
        elif isinstance(record, Kill):
            self._kill(record.name, record.incarnation)
        elif isinstance(record, Renewed):
            self._renewal.granted(record.number)
        elif isinstance(record, Promote):
            self._children.promote(record)
        elif isinstance(record, Look):
            self._children.look(record, Path(self._config.run_dir))
        elif isinstance(record, Shutdown):
            self._end_with_head("its head told it to")

    def _kill(self, name: str, incarnation: int) -> None:
        if not self._nursery.kill(name, incarnation):
            self._children.kill(name, incarnation)

    async def _clean_up(self) -> None:
        self._nursery.close()
        await self._children.end()
        self._space.sweep()
        if self._config.is_remote or not self._runs_on:  # else the head's own socket is in it
            shutil.rmtree(self._config.socket_dir, ignore_errors=True)

    def _warn_of(self, zygote: str, reason: str) -> None:
        self._events.emit("zygote_unfit", zygote=zygote, reason=reason)
        text = f"zygote {zygote!r} is not used, and each of its actors imports for itself: {reason}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the agent's log

    def _say(self, record: Record) -> None:
        if isinstance(record, Exited):  # the head says more, unless it is hung
            facts = {"code": record.code, "signal": record.signal, "oom": record.oom}
            self._events.emit("process_exited", child=record.name, incarnation=record.incarnation, **facts)
        self._line.say(record)


def _fuse() -> Fuse | None:
    try:
        return Fuse()
    except OSError as error:  # the keeper and the actors' own fences are still there
        print(f"no timer that outlives a stop: {error}", file=sys.stderr, flush=True)  # noqa: T201 - its log
        return None
