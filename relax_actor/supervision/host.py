"""The head's end of a node agent: starts it on this host, holds its lease, knows when it is gone."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from relax_actor.actor.wire import NodeConfig
from relax_actor.node import cgroup, process, strays
from transport.address import Address
from transport.shm import ShmSpace

AGENT_END_S = 40.0
"""How long an agent may take to kill and reap everything before it is killed itself."""


def make_socket_dir(run_id: str) -> Path:
    """Make the run's private folder for sockets: short (AF_UNIX allows 107 bytes) and 0700."""
    base = Path("/tmp") if len(tempfile.gettempdir()) > 40 else Path(tempfile.gettempdir())  # noqa: S108
    parent = base / f"rx-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{parent} belongs to another user")
    folder = parent / run_id
    folder.mkdir(mode=0o700)
    return folder


class LocalAgent:
    """A node agent on this host. Its standard input is its lease: closing it ends everything it started."""

    def __init__(self, config: NodeConfig, log: Path) -> None:
        self._config = config
        self._sweep_after: dict[int, int] = {}
        frame = msgspec.msgpack.encode(config)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "relax_actor.node"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C in the terminal is for the head alone
            )
        self.pidfd = os.pidfd_open(self._process.pid)
        self._write(len(frame).to_bytes(4, "little") + frame)

    def started(self, pid: int) -> None:
        """Remember a process group, to be swept should the agent die."""
        self._sweep_after[pid] = process.start_time(pid) or 0

    def ended(self, pid: int) -> None:
        """Forget a process group that is gone."""
        self._sweep_after.pop(pid, None)

    def sweep(self) -> None:
        """Kill what a dead agent left: its actors died with it, their children may not have."""
        for pid, since in self._sweep_after.items():
            if process.start_time(pid) in (None, since):
                process.kill_group(pid)
        self._sweep_after.clear()
        self._process.wait()
        strays.kill_orphans(self._config.run_id, self._process.pid)
        cgroup.Cgroups(cgroup.root(self._config.run_id, self._process.pid)).close()
        os.close(self.pidfd)
        self._end_lease()

    def end(self) -> None:
        """End the lease, wait until everything is gone, and sweep what only a crash would leave."""
        self._end_lease()
        try:
            self._process.wait(AGENT_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.sweep()
        ShmSpace(self._config.run_id, self._config.shm_root).sweep()
        shutil.rmtree(self._config.socket_dir, ignore_errors=True)

    def _end_lease(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe above
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe above
        self._process.stdin.write(data)
        self._process.stdin.flush()


def actor_address(socket_dir: str, name: str, incarnation: int) -> Address:
    """Return where an incarnation binds: its name is in the path, so no call reaches the next one."""
    return Address.ipc(Path(socket_dir) / f"{name.replace('/', '-')}.{incarnation}")
