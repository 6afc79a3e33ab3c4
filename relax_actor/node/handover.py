"""How the files that a remote host's actors write reach the head: read as they grow, in bounded pieces.

Events are handed over whole and first. Actors write to files, as everywhere, so they never wait for a slow
head: the files are the buffer. A log that grows faster than it can be handed over is cut in its middle, which
is said in its place; the whole of it stays on its host.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from relax_actor.node.inband import Grown

EVENTS = "events.jsonl"
PIECE_BYTES = 256 * 1024
LOG_BACKLOG_BYTES = 4 * 1024 * 1024
"""A log that is further behind than this is cut down to its last `LOG_KEPT_BYTES`."""

LOG_KEPT_BYTES = 1024 * 1024


class Handover:
    """The files of one run folder. Not thread-safe.

    Args:
        folder: whose events, logs and crash reports are handed over.
        offsets: how far each file was handed over before; None begins at the ends of those that are there.
        say: takes each piece; may take its time.
    """

    def __init__(self, folder: Path, offsets: Mapping[str, int] | None, say: Callable[[Grown], None]) -> None:
        self._folder, self._say = folder, say
        self._offsets = dict(offsets or {})
        if offsets is None:
            self._begin_at_the_ends()

    def one_round(self, *, is_last: bool = False) -> bool:
        """Hand over all events and a piece of every other file; whether there was anything.

        Args:
            is_last: nobody writes any more, so that a line without its end will get none.
        """
        while self._hand_over_events(is_last=is_last):
            pass
        pieces = [self._hand_over(name) for name in self._names() if name != EVENTS]
        return any(pieces)

    def _begin_at_the_ends(self) -> None:
        """Leave out what is there of an earlier run, and let the head know, which may start another agent."""
        for name in filter(self._size, self._names()):
            self._offsets[name] = self._size(name)
            self._say(Grown(path=name, data=b"", offset=self._offsets[name]))

    def _names(self) -> Iterator[str]:
        yield EVENTS
        for pattern in ("failure.txt", "crash/*", "logs/*"):
            for path in sorted(self._folder.glob(pattern)):
                if path.is_file() and not path.is_symlink():
                    yield str(path.relative_to(self._folder))

    def _hand_over_events(self, *, is_last: bool) -> bool:
        at, size = self._offsets.get(EVENTS, 0), PIECE_BYTES
        data = self._read(EVENTS, at, size)
        while len(data) == size and b"\n" not in data:  # a line that is longer than a piece
            size *= 2
            data = self._read(EVENTS, at, size)
        whole = data[: data.rfind(b"\n") + 1]
        if is_last and len(data) < size and len(whole) < len(data):
            whole = data + b"\n"
        self._tell(EVENTS, whole, at + min(len(whole), len(data)))
        return bool(whole)

    def _hand_over(self, name: str) -> bool:
        at, size = self._offsets.get(name, 0), self._size(name)
        if size - at > LOG_BACKLOG_BYTES and name.startswith("logs/"):
            at = self._cut(name, at, size)
        data = self._read(name, at, PIECE_BYTES)
        self._tell(name, data, at + len(data))
        return bool(data)

    def _cut(self, name: str, at: int, size: int) -> int:
        left_out = size - LOG_KEPT_BYTES - at
        path = f"{socket.gethostname()}:{self._folder / name}"
        note = f"\n… {left_out:,} bytes were not handed over: they are in {path}\n"
        self._tell(name, note.encode(), at + left_out)
        return at + left_out

    def _tell(self, name: str, data: bytes, offset: int) -> None:
        is_new = name not in self._offsets and name != EVENTS  # an empty log is a log, too
        self._offsets[name] = offset
        if data or is_new:
            self._say(Grown(path=name, data=data, offset=offset))

    def _read(self, name: str, at: int, size: int) -> bytes:
        with suppress(OSError), (self._folder / name).open("rb") as file:
            file.seek(at)
            return file.read(size)
        return b""

    def _size(self, name: str) -> int:
        with suppress(OSError):
            return (self._folder / name).stat().st_size
        return 0
