"""The head's end of a node agent's process: starts it, ties it to the head, knows when it is gone."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relax_actor.actor.wire import NodeConfig
from relax_actor.node import cgroup, early, process, strays
from relax_actor.node.names import END_NOW
from transport.address import Address
from transport.shm import ShmSpace

AGENT_END_S = 40.0
"""How long an agent may take to kill and reap everything before it is killed itself."""

SSH_FAILED = 255
"""What ssh exits with when it has nothing to say of the other host."""


class AgentProcess:
    """A node agent, or the command that leads to it. Closing its standard input ends everything it started.

    Args:
        config: what it reads first.
        prefix: the command that runs another one on its host; empty for this host.
        python: the interpreter there.
        log: takes its standard output and error.

    Attributes:
        news: what an agent on this host says of deaths as soon as it feels them; see `node.early`.
    """

    def __init__(self, config: NodeConfig, prefix: Sequence[str], python: str, log: Path) -> None:
        self._config, self._is_local = config, not prefix
        self.log = log
        self._sweep_after: dict[int, int] = {}
        self.news, theirs = early.pair()
        if self._is_local:
            config = msgspec.structs.replace(config, early=theirs.fileno())
        frame = msgspec.msgpack.encode(config)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*prefix, python or sys.executable, "-P", "-m", "relax_actor.node"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[theirs.fileno()] if self._is_local else [],
                start_new_session=True,  # Ctrl-C in the terminal is for the head alone
            )
        theirs.close()
        self.pid = self._process.pid
        self.agent_pid = 0  # of the agent itself, once it has joined
        self.pidfd = os.pidfd_open(self.pid)
        self._write(len(frame).to_bytes(4, "little") + frame)

    def started(self, pid: int) -> None:
        """Remember a process group, to be swept should the agent die."""
        if self._is_local:
            self._sweep_after[pid] = process.start_time(pid) or 0

    def ended(self, pid: int) -> None:
        """Forget a process group that is gone."""
        self._sweep_after.pop(pid, None)

    def end_now(self) -> None:
        """Have it killed and swept although it is busy; on another host the lease does that."""
        if self._is_local:
            self._end_input()
            self._process.send_signal(END_NOW)
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the process here; on another host the lease does the rest."""
        self._end_input()
        self._process.kill()

    def reap(self) -> str:
        """Wait for the process, sweep what it left on this host, and say how it ended."""
        for pid, since in self._sweep_after.items():
            if process.start_time(pid) in (None, since):
                process.kill_group(pid)
        self._sweep_after.clear()
        self._process.wait()
        if self._is_local and self._process.returncode < 0:  # a keeper that was killed has swept nothing
            strays.kill_orphans(self._config.run_id, self.agent_pid)
            cgroup.Cgroups(cgroup.root(self._config.run_id, self.agent_pid)).close()
        os.close(self.pidfd)
        self._end_input()
        return _ending(self._process.returncode)

    @property
    def state(self) -> str:
        """Whether it runs, for a person."""
        code = self._process.poll()
        return f"started, pid {self.pid}" if code is None else f"ended with {_ending(code)}"

    @property
    def proves_the_end(self) -> bool:
        """Whether its exit says that nothing is left: it was on this host, or the code is its keeper's."""
        return self._is_local or 0 <= self._process.returncode < SSH_FAILED

    def begin_end(self) -> None:
        """Have it kill and sweep everything; `finish_end` waits for it."""
        self._end_input()

    def finish_end(self) -> None:
        """Wait until everything is gone, and sweep what only a crash would leave on this host."""
        try:
            self._process.wait(AGENT_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.reap()
        if self._is_local:
            ShmSpace(self._config.run_id, self._config.shm_root).sweep()
            shutil.rmtree(self._config.socket_dir, ignore_errors=True)

    def _end_input(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe above
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe above
        with contextlib.suppress(BrokenPipeError):  # it has ended already, as `pidfd` will tell
            self._process.stdin.write(data)
            self._process.stdin.flush()


def actor_address(socket_dir: str, name: str, incarnation: int) -> Address:
    """Return where an incarnation binds: its name is in the path, so no call reaches the next one."""
    return Address.ipc(Path(socket_dir) / f"{name.replace('/', '-')}.{incarnation}")


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
