"""How long each part of a server's start took, out of its log. Pure."""

import re
from collections.abc import Iterable
from datetime import datetime

_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?: TP\d+)?(?: PP\d+)?\] (.*)")
_MARKS = (
    ("imports", re.compile(r"server_args=")),
    ("spawn", re.compile(r"Load weight begin")),
    ("weights", re.compile(r"Load weight end")),
    ("kv_cache", re.compile(r"Memory pool end")),
    ("graphs", re.compile(r"Capture .*end")),
    ("ready", re.compile(r"Uvicorn running|fired up and ready")),
)


def phases(lines: Iterable[str], started_at: float) -> dict[str, float]:
    """Return the seconds from one mark to the next, as far as the start has come.

    Args:
        lines: of the log; their stamps are whole seconds of local time.
        started_at: when the process was started, in unix seconds.
    """
    reached: dict[str, float] = {}
    for line in lines:
        stamp = _STAMP.match(line)
        if stamp is None:
            continue
        at = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").astimezone().timestamp()
        reached.update({name: at for name, mark in _MARKS if mark.search(stamp[2])})
    ordered = sorted(reached.items(), key=lambda item: [name for name, _ in _MARKS].index(item[0]))
    before, took = started_at, {}
    for name, at in ordered:
        took[name] = max(0.0, round(at - before, 2))
        before = max(before, at)
    return took


def last_word(lines: Iterable[str]) -> str:
    """Return the last line that says something; an error's own where one came since the server served."""
    said: list[str] = []
    for line in filter(None, map(str.strip, lines)):
        said = [line] if _MARKS[-1][1].search(line) else [*said, line]
    raised = [line for line in said if re.match(r"^(?:\[.*?\] )?[\w.]*(?:Error|Exception)\b", line)]
    return (raised or said or [""])[-1][:300]
