"""Real sshds on loopback addresses of this machine, each of which stands for a host."""

import functools
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from free_ports import free_ports
from watching import eventually

from launcher.hosts import HostEntry
from launcher.options import SshOptions
from relax_actor.node.names import socket_folders

PACKAGES = Path(sys.executable).parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
ROOT = Path(__file__).parents[2]
_OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


def missing() -> str:
    """Return why no sshd can be started here, or nothing."""
    lacking = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if not Path("/usr/sbin/sshd").exists():
        lacking.append("sshd")
    return f"there is no {', '.join(lacking)}: apt-get install openssh-server" if lacking else ""


@functools.cache
def own_shm() -> tuple[str, ...]:
    """Return the command that runs another one with shared memory of its own; empty: there is no way."""
    done = subprocess.run([*_OWN_SHM, "true"], capture_output=True, check=False)
    return _OWN_SHM if done.returncode == 0 else ()


@dataclass
class Sshd:
    """One server, at an address and a port of its own."""

    folder: Path
    address: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def as_word(self) -> str:
        """The address as a hostfile has it."""
        return f"[{self.address}]" if ":" in self.address else self.address

    @property
    def sessions(self) -> list[psutil.Process]:
        """The processes of the server that are beyond its listener."""
        if self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self.process.pid).children(recursive=True)
                return [each for each in children if is_there(each)]
        return []

    def stop(self) -> None:
        """End the server and every session of it."""
        family = [self.process, *self.sessions]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


@dataclass
class Servers:
    """Keys, configuration and servers of one test session, in a folder of their own."""

    folder: Path
    stack: ExitStack
    started: int = 0
    running: list[Sshd] = field(default_factory=list)

    @property
    def key(self) -> Path:
        """The private key that every server accepts."""
        return self.folder / "id"

    @property
    def known_hosts(self) -> Path:
        """A file that knows every server."""
        return self.folder / "known_hosts"

    def make_keys(self) -> None:
        """Make a key for the user and one for the hosts."""
        for name in ("id", "host", "stranger"):
            command = [
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                "test",
                "-f",
                str(self.folder / name),
            ]
            subprocess.run(command, check=True)
        shutil.copy(self.folder / "id.pub", self.folder / "authorized_keys")
        self.known_hosts.touch()

    def start(
        self, *settings: str, address: str = "", inside: tuple[str, ...] = (), before: tuple[str, ...] = ()
    ) -> Sshd:
        """Start one more server, with further lines of configuration.

        Args:
            settings: such as `MaxStartups 1`.
            address: where it listens; by default one of its own of 127/8.
            inside: the command that runs another one in the network where the server is to be.
            before: the command that runs the server.
        """
        self.started += 1
        address = address or f"127.0.0.{self.started + 1}"
        port = 22022 if inside else free_ports(1, address)[0]
        folder = self.folder / f"sshd-{self.started}"
        folder.mkdir()
        config = [
            f"ListenAddress {address}:{port}" if ":" not in address else f"ListenAddress [{address}]:{port}",
            f"HostKey {self.folder / 'host'}",
            f"AuthorizedKeysFile {self.folder / 'authorized_keys'}",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            f"PidFile {folder / 'pid'}",
            *settings,
        ]
        (folder / "config").write_text("\n".join(config) + "\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*inside, *before, "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "config")],
                stderr=log,
                start_new_session=True,
            )
        server = Sshd(folder, address, port, process)
        self.stack.callback(server.stop)
        self.running.append(server)
        eventually(lambda: "Server listening on" in (folder / "log").read_text())
        key = (self.folder / "host.pub").read_text().split()
        with self.known_hosts.open("a") as known:
            known.write(f"[{address}]:{port} {key[0]} {key[1]}\n")
        return server

    def options(self, *options: str, **fields: object) -> SshOptions:
        """Return options that reach every server with its key; `options` go first."""
        ours = (f"UserKnownHostsFile={self.known_hosts}", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes")
        return SshOptions(options=(*options, *ours), identity=str(self.key), **fields)

    @staticmethod
    def entry(server: Sshd, **fields: object) -> HostEntry:
        """Return a server as a line of a hostfile."""
        return HostEntry(name=server.address, port=server.port, slots=1, **fields)


def make_venv(folder: Path) -> Path:
    """Make an environment outside of every PATH that has what this one has; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "all.pth").write_text(f"{ROOT}\n{PACKAGES}\n")
    return folder / "bin" / "python"


def running_of(run_id: str) -> list[str]:
    """Return what is left of a run on this machine: processes by their marks, segments, socket folders."""
    found = []
    for process in psutil.process_iter():
        try:
            if run_id in process.environ().get("RELAX_ACTOR_MARK", ""):
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    shm = [str(path) for path in Path("/dev/shm").iterdir() if run_id in path.name]  # noqa: S108 - that is where
    sockets = [str(path) for path in socket_folders().glob(f"*{run_id}*")]
    return found + shm + sockets


def await_nothing(run_id: str, processes: list[psutil.Process], within_s: float = 40.0) -> None:
    """Return once nothing of a run is left.

    Args:
        run_id: of the run.
        processes: which must be gone as well.
        within_s: how long it may take; a session that hangs is given up after 15 s.

    Raises:
        AssertionError: something is left; says what.
    """
    since = time.monotonic()
    while left := [*map(_described, filter(is_there, processes)), *running_of(run_id)]:
        assert time.monotonic() - since < within_s, left
        time.sleep(0.05)


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"{process.pid}"


def family_of(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all below it."""
    return [process, *process.children(recursive=True)]


def is_there(process: psutil.Process) -> bool:
    """Whether a process runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(process: psutil.Process) -> None:
    """Stop a process as a debugger would."""
    process.send_signal(signal.SIGSTOP)
