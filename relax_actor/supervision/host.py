"""The head's end of a node agent's process: starts it, ties it to the head, knows when it is gone."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from relax_actor.actor.wire import NodeConfig
from relax_actor.node import cgroup, early, process, strays
from relax_actor.node.inband import Boot, framed
from relax_actor.node.names import END_NOW
from relax_actor.supervision.intake import Files, Intake
from transport.address import Address
from transport.shm import ShmSpace

AGENT_END_S = 40.0
"""How long an agent may take to kill and reap everything before it is killed itself."""

OUTPUT_BYTES = 64 * 1024
"""How much of what a start has written is looked at."""

SSH_FAILED = 255
"""What ssh exits with when it has nothing to say of the other host."""


class AgentProcess:
    """A node agent, or the command that leads to it. Closing its standard input ends everything it started.

    Args:
        config: what it reads first.
        prefix: the command that runs another one on its host; empty for this host.
        python: the interpreter there.
        log: takes its standard output and error.
        boot: what it starts in, on another host; None: it starts in what the prefix leads to.
        env: added to its environment, on this host.
        files: take what another host hands over.
        on_reached: called, in another thread, once such a host has answered.

    Attributes:
        news: what an agent on this host says of deaths as soon as it feels them; see `node.early`.
        intake: what another host says of itself, where it was given a `boot`.
    """

    def __init__(
        self,
        config: NodeConfig,
        prefix: Sequence[str],
        python: str,
        log: Path,
        *,
        boot: Boot | None = None,
        env: Mapping[bytes, bytes] | None = None,
        files: Files | None = None,
        on_reached: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._is_local = config, not prefix
        self.log = log
        self._log_from = log.stat().st_size if log.exists() else 0
        self._sweep_after: dict[int, int] = {}
        self.news, theirs = early.pair()
        if self._is_local:
            config = msgspec.structs.replace(config, early=theirs.fileno())
        frame = msgspec.msgpack.encode(config)
        how = [] if boot is None else ["--stdin-frame"]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*prefix, python or sys.executable, "-P", "-m", "relax_actor.node", *how],
                stdin=subprocess.PIPE,
                stdout=out if boot is None else subprocess.PIPE,
                stderr=out,
                env={**os.environb, **env} if env else None,
                pass_fds=[theirs.fileno()] if self._is_local else [],
                start_new_session=True,  # Ctrl-C in the terminal is for the head alone
            )
        theirs.close()
        self.pid = self._process.pid
        self.agent_pid = 0  # of the agent itself, once it has joined
        self.pidfd = os.pidfd_open(self.pid)
        self.intake: Intake | None = None
        if boot is not None:
            assert self._process.stdout is not None and files is not None  # noqa: S101, PT018 - as above
            self.intake = Intake(self._process.stdout, boot.word, files, log, on_reached)
            self._write(framed(boot))
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
        if self.intake is not None:
            self.intake.close()
        if self._is_local and self._process.returncode < 0:  # a keeper that was killed has swept nothing
            strays.kill_orphans(self._config.run_id, self.agent_pid)
            cgroup.Cgroups(cgroup.root(self._config.run_id, self.agent_pid)).close()
        os.close(self.pidfd)
        self._end_input()
        return _ending(self._process.returncode)

    @property
    def state(self) -> str:
        """Whether it runs, for a person."""
        if self.refusal:
            return f"refused: {self.refusal}"
        code = self._process.poll()
        return f"started, pid {self.pid}" if code is None else f"ended with {_ending(code)}"

    @property
    def code(self) -> int | None:
        """How the process here ended, once it has; a signal's number is negative."""
        return self._process.returncode

    @property
    def output(self) -> str:
        """What it, or the way to it, has written so far."""
        with self.log.open("rb") as log:
            log.seek(self._log_from)
            return log.read(OUTPUT_BYTES).decode(errors="replace")

    @property
    def refusal(self) -> str:
        """Why no agent is started on another host, by its own word."""
        refused = self.intake.refused if self.intake is not None else None
        return refused.fact if refused is not None else ""

    @property
    def proves_the_end(self) -> bool:
        """Whether its exit says that nothing is left: it was on this host, or its keeper has said so."""
        if self.intake is not None:
            return self.intake.ended is not None
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
