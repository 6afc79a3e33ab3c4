"""The logs of a run's actors as files that grow and multiply."""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from launcher.merging import Source

_BYTES_A_LINE = 1024
_MAX_LINE_BYTES = 64 * 1024
_MAX_READ_BYTES = 4 * 1024 * 1024


class Tail:
    """The lines of a growing file.

    Args:
        path: of the file.
        last: begin with the `last` ones of those that are there; None begins with the first.
        offset: begin at this byte, where `last` is None.
    """

    def __init__(self, path: Path, last: int | None, offset: int = 0) -> None:
        self.path, self._last, self._offset, self._rest = path, last, offset, b""

    def lines(self) -> Iterator[str]:
        """Yield what was written since the last call; a line without its end waits for it."""
        with self.path.open("rb") as file:
            if self._last is not None:
                size = file.seek(0, os.SEEK_END)
                self._offset = max(0, size - self._last * _BYTES_A_LINE)
            file.seek(self._offset)
            data = self._rest + file.read(_MAX_READ_BYTES if self._last is None else -1)
            self._offset = file.tell()
        *whole, self._rest = data.split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:  # such a line is shown in pieces
            whole, self._rest = [*whole, self._rest], b""
        last, self._last = self._last, None
        for line in whole if last is None else deque(whole, last):
            yield line.decode("utf-8", "backslashreplace")


def log_files(folder: Path, actor: str = "") -> list[Path]:
    """Return the logs of an actor, of all replicas of a role, or of all actors, by name and incarnation.

    Args:
        folder: `logs` of the run folder.
        actor: `rollout/3`, `rollout-3`, a role such as `rollout`, or empty for all.
    """

    def wanted(path: Path) -> bool:
        name = actor_of(path)
        return not actor or actor in {name, name.replace("/", "-"), name.partition("/")[0]}

    return sorted(filter(wanted, folder.glob("*-*.log")), key=source_of)


def source_of(path: Path) -> Source:
    """Return whose log a file is, by its name: `rollout-0-2.log` is `rollout/0`, second incarnation."""
    actor, _, incarnation = path.stem.rpartition("-")
    role, dash, replica = actor.rpartition("-")
    number = int(incarnation) if incarnation.isdecimal() else 0
    if dash and replica.isdecimal():
        return Source(role=role, replica=int(replica), incarnation=number)
    return Source(role=actor, replica=-1, incarnation=number)


def actor_of(path: Path) -> str:
    """Return the name of the actor whose log a file is."""
    return str(source_of(path)).rpartition("#")[0]
