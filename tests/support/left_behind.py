"""What the processes that a test starts leave on this host, told from what everybody else's leave.

Processes are told by a variable in their environment. What they have open in shared memory is looked at as
soon as there is a new name. Temporary files go to a folder of their own, since nobody could tell them later.
"""

import os
import secrets
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

from relax_actor.engines.sglang.server_files import SEGMENTS, SHARED_MEMORY
from relax_actor.node.names import socket_folders
from transport import leavings

MARK = "RELAX_ACTOR_TEST"
LOOK_S = 0.01
SETTLE_S = 60.0
"""How long what is dying may take."""


class LeftBehind:
    """Marks what this process starts from now on, until it is closed."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._folder = tempfile.mkdtemp(prefix="rxt-", dir="/tmp")  # short: sockets are in it
        self._saved = {name: os.environ.get(name) for name in (MARK, "TMPDIR")}
        self._tempdir = tempfile.tempdir
        os.environ.update({MARK: self._mark, "TMPDIR": self._folder})
        tempfile.tempdir = self._folder
        self.files: set[Path] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self, *, settle_s: float = SETTLE_S) -> list[str]:
        """Stop looking; return, in words, what is left when what is dying has had its time."""
        until = time.monotonic() + settle_s
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(LOOK_S)
        self._stop.set()
        self._thread.join()
        for name, value in self._saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        tempfile.tempdir = self._tempdir
        shutil.rmtree(self._folder, ignore_errors=True)
        for file in self.files:  # the next one is not to blame
            file.unlink(missing_ok=True)
        return left

    def left(self) -> list[str]:
        """Return, in words, what there is now."""
        files = [str(file) for file in self.files if file.exists()]
        processes = [f"{pid}: {_title(pid)}" for pid in self._processes()]
        kept = socket_folders()  # that of the folders of runs and servers
        below = (Path(folder, name) for folder, *names in os.walk(self._folder) for name in chain(*names))
        return [*files, *processes, *(str(path) for path in below if path != kept)]

    def _watch(self) -> None:
        judged: set[str] = set()
        before: set[str] = set()
        while not self._stop.wait(LOOK_S):
            names = {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(SEGMENTS)}
            if names - judged:
                for pid in self._processes():
                    self.files |= leavings.held_by(pid, SHARED_MEMORY)
            judged, before = before, names

    def _processes(self) -> list[int]:
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "it ended"
