"""A run as seen from another terminal: its event log, the kernel's word on its processes, and no more.

Nothing here asks the head of anything on this host, so what is built on it works while the head is stopped
or hung. Only what is on other hosts is asked of their node agents, through the head (`distant`).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from launcher.distant import ask_head
from launcher.errors import RunFolderError
from launcher.fields import nearest
from launcher.lives import ALIVE, Life, Lives
from launcher.pages import in_method_s, kept_page, read_page
from launcher.runfolder import RunFolder
from relax_actor.actor.wire import Look
from relax_actor.node.facts import ProcessFacts, look
from relax_actor.node.sight import Sight
from relax_actor.telemetry import Event, decode_event

_CHUNK_BYTES = 4 * 1024 * 1024
LIFE_KINDS = re.compile(
    rb'"kind": ?"(?:child_|supervisor_|tree_|run_|process_exited|escalated|host_|lease_ended)'
)
"""What `Lives` is folded from; of a long run it is a small part, so other lines are not even decoded."""


class RunView:
    """One run folder, looked at again and again."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.lives = Lives()
        self._offset = 0
        self._distant: dict[tuple[str, int], Sight | None] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what was written since the last look."""
        self._distant.clear()
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
        """Return how an incarnation's process is, None where it is gone or out of sight."""
        if life.phase not in ALIVE:
            return None
        if self.is_near(life):
            return look(life.pid, life.start_ticks)
        sight = self.distant(life)
        return sight.facts if sight else None

    def is_gone(self, life: Life) -> bool:
        """Whether it is known that an incarnation has no process any more."""
        if life.phase not in ALIVE:
            return True
        sight = self.sight(life)
        return sight is not None and sight.facts is None

    def is_near(self, life: Life) -> bool:
        """Whether an incarnation is, or was, on this host."""
        return life.host in {"", _here()}

    def sight(self, life: Life) -> Sight | None:
        """Return how an incarnation is or was left behind; None where it is out of sight."""
        if not self.is_near(life):
            return self.distant(life)
        facts = self.process(life)
        if facts is not None:
            page = read_page(
                self.lives.run_id, life.shm_root or self.lives.shm_root, life.name, life.incarnation
            )
        else:
            page = kept_page(self.folder.crash_path(life.name, life.incarnation, ".json"))
        return Sight(facts=facts, page=page, in_method_s=in_method_s(page) if page else None)

    def distant(self, life: Life, *, wants_stacks: bool = False) -> Sight | None:
        """Return what the node agent of another host sees; asked once for all who live, until `refresh`."""
        key = life.name, life.incarnation
        if wants_stacks or key not in self._distant:
            living = [each[-1] for each in self.lives.actors.values() if each[-1].phase in ALIVE]
            others = [each for each in living if not self.is_near(each) and not wants_stacks]
            wanted = {(each.name, each.incarnation): each for each in [*others, life]}
            self._distant |= self._ask(list(wanted.values()), wants_stacks=wants_stacks)
        return self._distant.get(key)

    def _ask(self, lives: list[Life], *, wants_stacks: bool) -> dict[tuple[str, int], Sight | None]:
        keys = [(life.name, life.incarnation) for life in lives]
        if not self.is_here or not self.lives.address:
            return dict.fromkeys(keys)
        looks = [
            Look(
                id=number,
                host=life.site,
                name=life.name,
                incarnation=life.incarnation,
                wants_stacks=wants_stacks,
            )
            for number, life in enumerate(lives)
        ]
        sights = ask_head(self.lives.address, looks)
        return {key: sights.get(number) for number, key in enumerate(keys)}

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
