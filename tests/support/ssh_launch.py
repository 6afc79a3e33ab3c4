"""`relax-actor launch` over real sshds, as a test sees it: started, looked at, ended."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from loop_run import SUPPORT, loop_config
from ssh_hosts import Servers, Sshd, family_of
from watching import eventually

from launcher.toml import to_toml
from relax_actor.telemetry import Event, read_events

_LISTEN = "0A"


@dataclass
class Launched:
    """A launch that goes on, or is over."""

    process: subprocess.Popen[str]
    folder: Path

    def events(self, kind: str) -> list[Event]:
        """Return the events of a kind so far."""
        return [event for event in read_events(self.folder / "events.jsonl")[0] if event["kind"] == kind]

    def await_event(self, kind: str, timeout_s: float = 120.0, **fields: object) -> None:
        """Return once there is an event of a kind with these fields; fail if the launch ends without."""

        def is_there() -> bool:
            is_over = self.process.poll() is not None  # looked at first: its last events are seen then
            if any(fields.items() <= event.items() for event in self.events(kind)):
                return True
            assert not is_over, self.output()
            return False

        eventually(is_there, timeout_s)

    def output(self) -> str:
        """Return what it has printed."""
        return (self.folder.parent / "out").read_text()

    def ended(self, timeout_s: float = 120.0) -> int:
        """Wait for its end and return its exit code."""
        return self.process.wait(timeout_s)

    def seen(self, command: str, *words: str) -> str:
        """Return what a command says of the run."""
        line = [sys.executable, "-m", "relax_actor", command, str(self.folder), *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr

    @property
    def run_id(self) -> str:
        """The newest run's."""
        return self.events("tree_started")[-1]["run_id"]

    @property
    def steps(self) -> list[Event]:
        """Every step so far."""
        return self.events("step")

    def family(self, servers: Iterable[Sshd]) -> list[psutil.Process]:
        """Return all processes of the run: those below the launcher, and those in sessions of servers."""
        mine = [each for server in servers for each in server.sessions]
        return [*family_of(psutil.Process(self.process.pid)), *mine]


class Launcher:
    """Starts launches, and ends those that a test has left.

    Args:
        servers: whose keys are used.
        python: the interpreter of the hosts.
        tiny_model: the fixture.
        folder: of the test.
    """

    def __init__(self, servers: Servers, python: Path, tiny_model: Any, folder: Path) -> None:
        self._servers, self._python, self._model, self._folder = servers, python, tiny_model, folder
        self._started: list[subprocess.Popen[str]] = []

    def __call__(
        self,
        which: Sequence[Sshd],
        *words: str,
        inside: tuple[str, ...] = (),
        steps: int = 5,
        rollout: dict[str, Any] | None = None,
        **sections: dict[str, Any],
    ) -> Launched:
        """Start a launch.

        Args:
            which: the hosts.
            words: further options.
            inside: the command that runs another one in the network of the hosts.
            steps: of the run.
            rollout: settings of the rollouts; by default two of the scripted engine.
            sections: of the configuration.
        """
        settings = self._servers.options().options
        command = [
            *inside,
            *(sys.executable, "-m", "relax_actor", "launch", str(self._config(steps, rollout, sections))),
            *("-H", str(self._hostfile(which)), "--identity", str(self._servers.key)),
            *(f"--ssh-opt={option}" for option in settings),
            *("--remote-python", str(self._python), "--run-dir", str(self._folder / "run"), "--plain"),
            *words,
        ]
        with (self._folder / "out").open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, text=True, start_new_session=True)
        self._started.append(process)
        return Launched(process, self._folder / "run")

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _config(self, steps: int, rollout: dict[str, Any] | None, sections: dict[str, Any]) -> Path:
        run = {"steps": steps, "grace_s": 20.0, "max_staleness": 1, "user_path": str(SUPPORT)}
        rollout = {"replicas": 2, "device": "cpu"} | (rollout or {})
        config = loop_config(self._model, run=run, rollout=rollout, train={"device": "cpu"}, **sections)
        (self._folder / "run.toml").write_text(to_toml(config))
        return self._folder / "run.toml"

    def _hostfile(self, which: Sequence[Sshd]) -> Path:
        lines = [f"{server.as_word} slots=2 port={server.port}\n" for server in which]
        (self._folder / "hostfile").write_text("".join(lines))
        return self._folder / "hostfile"


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Return the TCP addresses at which processes listen, each in its own network."""
    found = set()
    tables: dict[str, dict[str, tuple[str, int]]] = {}  # of each network
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        with suppress(OSError):  # it has ended
            network = str((folder / "ns/net").readlink())
            if network not in tables:
                tables[network] = {f"socket:[{inode}]": where for inode, where in _listeners(process.pid)}
            found |= {tables[network][link] for link in _links(folder / "fd") if link in tables[network]}
    return found


def _links(folder: Path) -> Iterator[str]:
    for each in folder.iterdir():
        with suppress(OSError):  # closed meanwhile
            yield str(each.readlink())


def listened_at() -> set[tuple[str, int]]:
    """Return the TCP addresses at which anybody listens in this process' network."""
    return {where for _, where in _listeners(os.getpid())}


def _listeners(pid: int) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield inode and address of every TCP socket that listens in the network of a process."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                yield fields[9], _address(*fields[1].split(":"))


def _address(host: str, port: str) -> tuple[str, int]:
    words = b"".join(int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8))
    family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, words), int(port, 16)
