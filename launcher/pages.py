"""The status page of an actor: what it says of itself in shared memory, which outlives it.

A live actor's page is read where it is. Of a dead one the node agent keeps a copy in the run folder, before
the memory is swept.
"""

import time
from pathlib import Path

import msgspec

from relax_actor.actor.page import PageRecord, PageView
from transport.segment import SegmentError
from transport.shm import ShmSpace


def in_method_s(page: PageRecord) -> float | None:
    """Return for how long the method of a live actor has been running, in seconds, if one is."""
    return max(0.0, time.monotonic() - page.method_since_s) if page.method else None


def read_page(run_id: str, root: str, name: str, incarnation: int) -> PageRecord | None:
    """Return what the page of a live incarnation says, or None where there is none."""
    try:
        return PageView.read(ShmSpace(run_id, root), name, incarnation)
    except (SegmentError, OSError):  # an older log, which does not say where the memory is
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
