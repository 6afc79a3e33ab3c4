"""What a server would leave on its host if it were killed: found while it lives, removed when it is dead.

SGLang and its libraries make files in `/dev/shm`, and more of them while it serves: a look at who has which
tells whose they are, which nobody can tell afterwards. So a thread looks whenever there is a new name, and
what it finds is written down. All else goes into a temporary folder of the server's own.
"""

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from relax_actor.node.names import make_socket_dir
from transport import leavings

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - SGLang's folder
SEGMENTS = ("sglang_", "sgl_shm_", "multi_tokenizer_args_", "sem.mp-", "psm_", "torch_", "nccl-", "cuda.shm.")
"""How the names of what SGLang and its libraries make there begin; a user's model may lie there, too."""

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""The variable of the one folder of torch's that is a temporary one and meant to stay."""

LOOK_S = 0.05
"""How often is looked whether there is a new name; a file that is younger when all is killed may stay."""


class ServerFiles:
    """Finds a server's files until it is closed.

    Args:
        remember: told, as soon as they are seen, the files and folders that stay where all is killed at once.
    """

    def __init__(self, remember: Callable[[Iterable[Path]], None]) -> None:
        self._remember = remember
        self._files: set[Path] = set()
        self._untold: set[Path] = set()
        self._pid = 0
        self._looking, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sglang-files", daemon=True)
        self.folder = make_socket_dir(f"sglang-{secrets.token_hex(8)}")  # SGLang's sockets are in it, too
        self._tell({self.folder})

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which temporary files go into the server's own folder.

        Args:
            own: the actor's environment.
        """
        new = {} if COMPILED in own else {COMPILED: _compiled(own)}
        # Last: a process finds the room for its title by its first variable, if nobody has set that anew.
        return {**own, **new, "TMPDIR": str(self.folder)}

    def watch(self, pid: int) -> None:
        """Begin to look at what the server has, whose main process this is."""
        self._pid = pid
        self._thread.start()

    def look(self) -> None:
        """Have written down what the server has now."""
        with self._looking:
            found = {file for pid in _family(self._pid) for file in _segments(pid)} - self._files
            self._files |= found
            self._tell(found)

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def remove(self) -> None:
        """Remove what was found, but for what this process has, too; the server is dead. Idempotent."""
        for file in self._files - _segments(os.getpid()):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        """Look at each new name twice: between a file's name and its maker's descriptor there is a moment."""
        judged: set[str] = set()
        before: set[str] = set()
        while not self._stop.wait(LOOK_S):
            names = _names()
            if names - judged or self._untold:
                self.look()
            judged, before = before, names

    def _tell(self, found: set[Path]) -> None:
        self._untold |= found
        if self._untold:
            with suppress(OSError):  # no room to write it down: the next look tries again
                self._remember(self._untold)
                self._untold = set()


def _compiled(own: Mapping[str, str]) -> str:
    """Return where newer versions of SGLang have torch keep what it compiles, for the next server, too."""
    return str(Path(own.get("SGLANG_CACHE_DIR", "~/.cache/sglang")).expanduser() / "inductor")


def _names() -> set[str]:
    """Return the names in shared memory that may be of a server."""
    with suppress(FileNotFoundError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.name for entry in entries if entry.name.startswith(SEGMENTS)}
    return set()


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    with suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def _segments(pid: int) -> set[Path]:
    """Return the files of SGLang's own in shared memory that a process has open or mapped."""
    return {path for path in leavings.held_by(pid, SHARED_MEMORY) if path.name.startswith(SEGMENTS)}
