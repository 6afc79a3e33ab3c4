"""The ledger's word: written down before anybody is told."""

import time
from pathlib import Path

from relax_actor.faults import point
from relax_actor.telemetry import EventLog
from relax_actor.transfer_queue.events import BatchExtended, BatchLeased, Event, PromptLeased, RewardLeased
from relax_actor.transfer_queue.journal import Journal, JournalSpaceError
from relax_actor.transfer_queue.ledger import Ledger

LOOK_S = 0.2

RESERVE_BYTES = 32 << 10
"""Kept for last words: where the journal has no room, the error's text has none either."""

_LOANS = PromptLeased | RewardLeased | BatchLeased | BatchExtended
"""After these nobody else finds more than before."""


class Word:
    """Writes what the ledger decided.

    Args:
        ledger: whose events they are.
        path: of the journal.
        events: told of a full disk.
        full_s: how long there may be no room.
    """

    def __init__(self, ledger: Ledger, path: Path, events: EventLog, *, full_s: float) -> None:
        self._ledger, self._events, self._full_s = ledger, events, full_s
        self._journal: Journal[Event] = Journal(path)
        self._reserve = path.with_suffix(".reserve")
        self._reserve.write_bytes(bytes(RESERVE_BYTES))
        self.is_given = False  # whether something was written since somebody asked; theirs to reset

    def give(self) -> bool:
        """Write what was decided; return whether others may find more than before because of it.

        Raises:
            JournalSpaceError: there is no room for long. Nobody was told of what is not written.
        """
        events = self._ledger.take_events()
        if not events and not self._journal.is_pending:
            return False
        point("queue_decided")
        self._journal.append(events)
        self._write()
        self.is_given = True
        point("queue_committed")
        return any(not isinstance(event, _LOANS) for event in events)

    def close(self) -> None:
        """Give back the room for last words."""
        self._reserve.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write; where the disk is full, stand still until it has room."""
        deadline, is_said = time.monotonic() + self._full_s, False
        while True:
            try:
                self._journal.commit()  # also what an earlier one had no room for
            except JournalSpaceError as error:
                if time.monotonic() >= deadline:
                    self._reserve.unlink(missing_ok=True)
                    raise
                if not is_said:
                    self._events.emit("journal_full", reason=str(error))
                is_said = True
                time.sleep(LOOK_S)
            else:
                return
