"""The head's end of a session to a remote host: what the host says of itself, and the files it hands over.

A thread of its own reads the session, so that a slow disk holds up nobody but the far end's handover, and so
that the last words of an agent are heard while the head's loop waits for its end.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO

from relax_actor.node.inband import Began, Ended, Grown, Refused, Said, Unframer
from transport.errors import CodecError

JOIN_S = 3.0
"""How long the last bytes may take once the session's process has ended."""

_READ_BYTES = 256 * 1024
_FULL_DISK_S = 1.0
_FOLDERS = frozenset({"logs", "crash"})


class Files:
    """The head's copies of one host's files, over all its agents.

    Args:
        folder: the head's run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] | None = None  # until the host was reached

    @property
    def offsets(self) -> dict[str, int] | None:
        """How far each file has come; None for a host that was not reached yet."""
        return None if self._offsets is None else dict(self._offsets)

    def begin(self) -> None:
        """Note that the host was reached."""
        self._offsets = self._offsets or {}

    def take(self, grown: Grown) -> None:
        """Append what a file has grown by; waits where the disk is full."""
        path = self._path(grown.path)
        if path is None:
            return
        rest = memoryview(grown.data)
        while rest or not path.exists():
            try:
                rest = rest[_append(path, rest) :]
            except OSError:
                time.sleep(_FULL_DISK_S)
        self.begin()
        assert self._offsets is not None  # noqa: S101 - it has begun
        self._offsets[grown.path] = grown.offset

    def _path(self, name: str) -> Path | None:
        """Return where a file goes; None for a name that no agent would give."""
        match PurePosixPath(name).parts:
            case ("events.jsonl" | "failure.txt",):
                return self._folder / name
            case (folder, file) if folder in _FOLDERS and file not in {".", ".."}:
                return self._folder / folder / file
        return None


class Intake:
    """Reads one session in a thread of its own.

    Args:
        stream: the session's standard output.
        word: after which it speaks.
        files: take what is handed over.
        log: takes the noise before the word.
        on_began: called in the thread once the host is reached.

    Attributes:
        began: what the host said of itself; None until it is reached.
        refused: why no agent is started there.
        ended: the keeper's exit code, by its own word.
    """

    def __init__(
        self, stream: IO[bytes], word: str, files: Files, log: Path, on_began: Callable[[], None]
    ) -> None:
        self._stream, self._files, self._log, self._on_began = stream, files, log, on_began
        self._unframer = Unframer(word)
        self.began: Began | None = None
        self.refused: Refused | None = None
        self.ended: int | None = None
        self._thread = threading.Thread(target=self._read, name="intake", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for what is still on its way."""
        self._thread.join(JOIN_S)

    def _read(self) -> None:
        with suppress(CodecError, OSError), self._stream:
            while data := os.read(self._stream.fileno(), _READ_BYTES):
                for record in self._unframer.feed(data):
                    self._take(record)
        if self.began is None:
            self._keep_noise()

    def _take(self, record: Said) -> None:
        match record:
            case Began():
                self._keep_noise()
                self._files.begin()
                self.began = record
                self._on_began()
            case Refused():
                self.refused = record
            case Grown():
                self._files.take(record)
            case Ended():
                self.ended = record.code

    def _keep_noise(self) -> None:
        """Let people see what a login shell wrote."""
        if noise := self._unframer.noise.strip():
            with suppress(OSError), self._log.open("ab") as log:
                log.write(noise + b"\n")


def _append(path: Path, data: memoryview) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)
