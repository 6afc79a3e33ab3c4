"""Actors for the tests of hosts whose files are handed over: they write."""

import os
import signal
import sys
from pathlib import Path

from relax_actor import Actor, endpoint


class Writer(Actor):
    """Writes into its log and into the event log of its host."""

    @endpoint
    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    @endpoint
    def tell(self, count: int) -> None:
        for number in range(count):
            self.ctx.events.emit("told", number=number)

    @endpoint
    def fill(self, size_bytes: int) -> None:
        line = "x" * 99 + "\n"
        sys.stdout.write(line * (size_bytes // len(line)))
        sys.stdout.flush()

    @endpoint
    def die_saying(self, text: str) -> None:
        self.say(text)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def surroundings(self) -> tuple[str, dict[str, str]]:
        return str(Path.cwd()), dict(os.environ)
