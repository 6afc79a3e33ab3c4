"""The queue's word, in a file before anybody is told; without room for it, nobody is told until there is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from relax_actor.row_queue.records import Event, decode_events, encode_events
from relax_actor.transfer_queue.journal import Journal, JournalSpaceError, read

COMPACT_BYTES: Final = 16 << 20
"""A journal as long as this is replaced by a snapshot, where that is much shorter."""


class Log:
    """A journal that a full disk cannot break.

    Args:
        path: of the journal.
        on_full: told once, each time that there is no room.

    Raises:
        JournalError: see `Journal`.
    """

    def __init__(self, path: Path, on_full: Callable[[JournalSpaceError], None]) -> None:
        self.past: list[Event] = list(read(path, decode_events))
        self._journal: Journal[Event] = Journal(path, encode=encode_events)
        self._on_full = on_full
        self._compacted_bytes = self._journal.nbytes
        self.is_behind = False
        """Whether something is decided and not written down."""

    def write(self, events: Sequence[Event] = ()) -> bool:
        """Write these, and what was left from before; return whether all of it is in the file."""
        self._journal.append(events)
        try:
            self._journal.commit()
        except JournalSpaceError as error:
            self._fell_behind(error)
        else:
            self.is_behind = False
        return not self.is_behind

    def compact(self, snapshot: Callable[[], list[Event]]) -> None:
        """Replace a long journal by what is left of it; it stays where there is no room for that."""
        if self._journal.nbytes < 2 * self._compacted_bytes + (0 if self.is_behind else COMPACT_BYTES):
            return
        try:
            self._journal.rewrite(snapshot())
        except JournalSpaceError as error:
            if not self.is_behind:  # nothing waits for it: it is tried again when it is longer
                self._on_full(error)
            self._compacted_bytes = self._journal.nbytes
            return
        self._compacted_bytes = self._journal.nbytes
        self.is_behind = False

    def _fell_behind(self, error: JournalSpaceError) -> None:
        if not self.is_behind:
            self._on_full(error)
        self.is_behind = True
