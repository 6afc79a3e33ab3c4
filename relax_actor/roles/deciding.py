"""An actor whose every answer is written down before it is given, and whose callers may wait for one."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from relax_actor.actor import Actor
from relax_actor.roles.parking import Parking
from relax_actor.roles.word import Word
from relax_actor.transfer_queue.journal import JournalSpaceError
from relax_actor.transfer_queue.ledger import Ledger

R = TypeVar("R")


class DecidingActor(Actor):
    """Keeps a ledger's word."""

    fatal = (JournalSpaceError,)
    full_s = 30.0
    """How long the journal may find no room before the queue gives up: nobody is answered meanwhile."""

    def _begin(self, ledger: Ledger, journal: Path) -> None:
        """Keep the word of this ledger from now on, in this file."""
        self._parking = Parking()
        self._word = Word(ledger, journal, self.ctx.events, full_s=self.full_s)

    async def _until(self, look: Callable[[], R | None], wait_s: float) -> R | None:
        found = await self._parking.until(look, wait_s)
        if self._word.give():
            self._notify()
        self.ctx.wake()
        return found

    def _notify(self) -> None:
        """Write down what was decided, before anybody is told, and look for what the parked want."""
        self._word.give()
        is_more = True
        while is_more:
            found = self._parking.look()
            is_more = self._word.give()
            self._parking.tell(found)
        self.ctx.wake()

    def _now(self) -> float:
        return time.monotonic()
