"""What a dead actor was doing and said last, out of its status page and its log."""

import json
import time
from pathlib import Path

from relax_actor.files import log_tail
from relax_actor.stacks import is_dump_line

MAX_CHARS = 400


def doing(page: Path) -> str:
    """Say what the actor was in the middle of, from the page its node agent kept; empty if nothing.

    Args:
        page: JSON, written on this host, whose clock it counts by.
    """
    try:
        facts = json.loads(page.read_bytes())
        method, call_id, since_s = facts["method"], facts["call_id"], float(facts["method_since_s"])
    except (OSError, ValueError, TypeError, LookupError):
        return ""
    return f"{time.monotonic() - since_s:.1f} s into {method} (call {call_id})" if method else ""


def last_line(log: Path) -> str:
    """Return the last line of a log that is not part of a dumped stack."""
    for line in reversed(log_tail(log)):
        if line.strip() and not is_dump_line(line):
            return line[:MAX_CHARS]
    return ""
