"""The server's process: started in a session of its own, watched, killed with all it started.

It dies with this actor (the kernel sees to that), and this actor learns at once when it, or one of its
schedulers, dies.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from relax_actor.engines.sglang.boot import last_word, phases
from relax_actor.engines.sglang.capabilities import Capabilities, capabilities
from relax_actor.engines.sglang.client import Client
from relax_actor.engines.sglang.errors import DeadlineError, ServerError, ServerGoneError, StartError
from relax_actor.engines.sglang.server_files import ServerFiles
from relax_actor.engines.sglang.settings import Ports, ServerSettings, command, environment
from relax_actor.engines.sglang.watch import Watch

START_S = 900.0
"""How long a server may take to come up: a cold machine compiles kernels and captures graphs."""

ANSWER_S = 5.0
POLL_S = 0.1
REAP_S = 10.0
LOG_TAIL_BYTES = 1 << 16

# Run in a fresh interpreter, which has no threads to disturb; it keeps its pid and becomes the server.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or os.kill(os.getpid(), signal.SIGKILL); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


class Server:
    """One SGLang server, from its start to its end.

    Must be made in the actor's main thread: the server dies with the thread that started it.

    Args:
        settings: how it is started.
        log: where its output goes.
        remember: see `ServerFiles`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        log: Path,
        *,
        remember: Callable[[Iterable[Path]], None] = lambda _: None,
    ) -> None:
        self.log = log
        self._sockets = [held_port(), held_port()]
        http, nccl = (each.getsockname()[1] for each in self._sockets)
        self.url = f"http://127.0.0.1:{http}"
        self.started_at, self._since = time.time(), time.monotonic()
        self._files = ServerFiles(remember)
        self._process = self._popen(settings, Ports(http=http, nccl=nccl))
        self._files.watch(self._process.pid)
        self._watch: Watch | None = None
        self._known = [self._process.pid]

    @property
    def pid(self) -> int:
        """Of its main process, which leads its session."""
        return self._process.pid

    def await_serving(self, client: Client, *, progress: Callable[[str], None]) -> Capabilities:
        """Return what it can do, once it answers.

        Args:
            client: of its address.
            progress: told how far it has come.

        Raises:
            StartError: it ended, or took too long.
        """
        while not self._answers(client):
            waited_s = time.monotonic() - self._since
            if ended := self.end():
                raise StartError(ended, self.last_word(), str(self.log))
            if waited_s > START_S:
                raise StartError(f"did not serve within {START_S:g} s", self.last_word(), str(self.log))
            progress(
                f"SGLang starts, {waited_s:.0f} s, has done: {', '.join(self.phases()) or 'nothing yet'}"
            )
            time.sleep(POLL_S)
        return capabilities(client.get("/server_info", deadline_s=ANSWER_S * 4))

    def end(self) -> str:
        """Return how its main process has ended; nothing while it runs."""
        return "" if self._process.poll() is None else f"ended with {self._exit()}"

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Have `on_end` called in another thread when a process of the server ends, with words for it."""
        processes = {self.pid: "SGLang's main process"}
        with suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                title = _title(child)
                if title.startswith("sglang::"):
                    processes[child.pid] = f"SGLang's process {title.removeprefix('sglang::')}"
        self._known = list(processes)
        self._watch = Watch(processes, lambda what: on_end(f"{what}; {self._last_words()}"))

    def phases(self) -> dict[str, float]:
        """Return how long each part of its start took, in seconds."""
        return phases(self._log_lines(), self.started_at)

    def last_word(self) -> str:
        """Return the last line of its log that says something."""
        return last_word(self._log_lines())

    def kill(self) -> None:
        """SIGKILL all its processes, reap the one that is ours, remove what it left. Idempotent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._files.close()
        self._signal(signal.SIGSTOP)  # so that it makes nothing after the last look
        self._files.look()
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        for held in self._sockets:
            held.close()
        self._files.remove()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _popen(self, settings: ServerSettings, ports: Ports) -> "subprocess.Popen[bytes]":
        words = command(settings, ports)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(settings, self._files.environment(os.environ), own_python=sys.executable),
                start_new_session=True,
                pass_fds=settings.keep_fds,
            )

    def _answers(self, client: Client) -> bool:
        try:
            client.get("/model_info", deadline_s=ANSWER_S)
        except (ServerGoneError, ServerError, DeadlineError):
            return False
        return True

    def _exit(self) -> str:
        code = self._process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def _last_words(self) -> str:
        return f"its log ends: {self.last_word() or 'it said nothing'}"

    def _log_lines(self) -> list[str]:
        with suppress(OSError), self.log.open("rb") as file:
            head = file.read(LOG_TAIL_BYTES)  # where a start's marks are
            end = max(file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, len(head))
            file.seek(end)
            return (head + file.read()).decode(errors="replace").splitlines()
        return []


def held_port(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Bind a port, so that the kernel gives it to nobody else; who listens on it uses SO_REUSEADDR too.

    Args:
        host: one of this host's addresses, or all.
        port: 0 is any.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(socket.getaddrinfo(host, port, held.family, socket.SOCK_STREAM)[0][4])
    return held


def _title(process: Any) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""
