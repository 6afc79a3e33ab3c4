"""A run as seen from another terminal: its event log, the kernel's word on its processes, and no more.

Nothing here asks the head, so everything that is built on it works while the head is stopped or hung.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import RunFolderError
from launcher.fields import nearest
from launcher.lives import ALIVE, Life, Lives
from launcher.processes import ProcessFacts, look
from launcher.runfolder import RunFolder
from relax_actor.telemetry import Event, decode_event

_CHUNK_BYTES = 4 * 1024 * 1024
LIFE_KINDS = re.compile(
    rb'"kind": ?"(?:child_|supervisor_|tree_|run_|process_exited|escalated|host_lost|lease_ended)'
)
"""What `Lives` is folded from; of a long run it is a small part, so other lines are not even decoded."""


class RunView:
    """One run folder, looked at again and again."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.lives = Lives()
        self._offset = 0
        self.refresh()

    def refresh(self) -> None:
        """Take in what was written since the last look."""
        for events, offset in read_some(self.folder.events, self._offset, LIFE_KINDS):
            self._offset = offset
            for event in events:
                self.lives.apply(event)

    @property
    def is_here(self) -> bool:
        """Whether the head runs, or ran, on this host; of another host the kernel here knows nothing."""
        holder = self.folder.holder()
        return (self.lives.host or (holder.host if holder else _here())) == _here()

    @property
    def is_running(self) -> bool:
        """Whether the head lives, as far as can be known."""
        holder = self.folder.holder()
        if holder is not None:
            return holder.is_alive
        return self.head() is not None or (not self.is_here and self.lives.ended is None)

    @property
    def head_line(self) -> str:
        """Say how the head is, in a line."""
        if not self.is_here:
            return f"head: on {self.lives.host}, out of sight from {_here()}"
        head, pid = self.head(), self.lives.head_pid
        if head is not None:
            stopped = ", stopped by a signal: nothing is decided until it goes on" if head.is_stopped else ""
            return f"head: pid {pid}{stopped}"
        if self.lives.ended is not None:
            return (
                f"ended with exit code {self.lives.ended.get('exit_code')}: {self.lives.ended.get('reason')}"
            )
        return f"head: gone (it was pid {pid})" if pid else "head: it has not started a tree yet"

    def head(self) -> ProcessFacts | None:
        """Return how the head's process is, None where it is gone or on another host."""
        return look(self.lives.head_pid, self.lives.head_start_ticks) if self.is_here else None

    def process(self, life: Life) -> ProcessFacts | None:
        """Return how an incarnation's process is, None where it is gone or on another host."""
        is_here = life.host in {"", _here()}
        return look(life.pid, life.start_ticks) if is_here and life.phase in ALIVE else None

    def actor(self, word: str) -> tuple[str, int | None]:
        """Return the name that a word means, `rollout-0` for `rollout/0` too, and its `#incarnation`.

        Raises:
            RunFolderError: there is no such actor.
        """
        wish, _, number = word.partition("#")
        names = {form: name for name in self.lives.names for form in (name, name.replace("/", "-"))}
        name = names.get(wish, "")
        incarnation = int(number) if number.isdecimal() else None
        if not name or (number and incarnation is None):
            raise RunFolderError(f"`{word}` is not an actor of `{self.folder.path}`", self._meant(wish))
        if incarnation is not None and self.lives.life(name, incarnation) is None:
            there = ", ".join(map(str, self.lives.actors.get(name, ()))) or "none yet"
            raise RunFolderError(f"`{word}` has not been started", f"there are {there}")
        return name, incarnation

    def _meant(self, word: str) -> str:
        names = self.lives.names
        if word in names:
            return f"{word}#1 is its first start"
        if replicas := [name for name in names if name.partition("/")[0] == word]:
            return f"its replicas are {', '.join(replicas)}"
        if close := nearest(word, names):
            return f"did you mean {close}?"
        return f"there are {', '.join(names)}" if names else "no actor has been started yet"


def read_some(path: Path, offset: int, wanted: re.Pattern[bytes]) -> Iterator[tuple[list[Event], int]]:
    """Read the events of an event log whose line has a pattern, a piece of the file at a time.

    Args:
        path: the event log; a missing one is empty.
        offset: in bytes, where to begin.
        wanted: lines without it are skipped undecoded.

    Yields:
        The events of a piece, and the offset after its last whole line, to begin at next time.
    """
    rest = b""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        while data := file.read(_CHUNK_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            end = file.tell() - len(rest)
            chosen = (decode_event(line) for line in lines if wanted.search(line))
            yield [event for event in chosen if event is not None], end


def _here() -> str:
    return os.uname().nodename
