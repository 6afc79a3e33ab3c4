"""What actors did when: the overlap of rollout and training, and a trace that Perfetto opens.

Pure functions of events. Times are unix seconds as the events have them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from launcher.runstate import number
from relax_actor.telemetry import Event

Interval = tuple[float, float]
"""Start and end, in seconds."""

_MARKS = frozenset(
    {"child_exited", "child_restarting", "policy_published", "policy_installed", "checkpoint_saved"}
)


def intervals(events: Iterable[Event], name: str, role: str = "") -> list[Interval]:
    """Return the spans of one name, of one role's actors or of all."""
    return [
        (start, start + number(event.get("dur_s")))
        for event in events
        if event.get("kind") == "span" and event.get("name") == name
        if not role or str(event.get("actor")).partition("/")[0] == role
        for start in (number(event.get("start")),)
    ]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as intervals that neither touch nor overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the moments in both of two unions."""
    common: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def overlap(events: Sequence[Event]) -> float | None:
    """Return the share of the trainer's `train` time in which at least one rollout was in `generate`.

    Returns:
        0 to 1; None where nothing was trained.
    """
    training = union(intervals(events, "train", "trainer"))
    if not training:
        return None
    generating = union(intervals(events, "generate", "rollout"))
    return _length(intersection(training, generating)) / _length(training)


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return the spans and marks of a run in the Trace Event Format.

    A process of the trace is an actor, a thread of it an incarnation; times are microseconds since the
    first event.

    Source:
        Trace Event Format, "complete" (X), "instant" (i) and "metadata" (M) events.
    """
    origin = min((number(event.get("start", event.get("t"))) for event in events), default=0.0)
    actors = {
        name: index for index, name in enumerate(sorted({str(event.get("actor")) for event in events}), 1)
    }
    trace = [*_named(actors), *(_traced(event, actors, origin) for event in events if _is_traced(event))]
    return {"displayTimeUnit": "ms", "traceEvents": trace}


def _length(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)


def _named(actors: dict[str, int]) -> Iterator[dict[str, Any]]:
    for name, pid in actors.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _is_traced(event: Event) -> bool:
    return event.get("kind") == "span" or event.get("kind") in _MARKS


def _traced(event: Event, actors: dict[str, int], origin: float) -> dict[str, Any]:
    header = {"t", "m", "actor", "inc", "pid", "kind", "name", "start", "dur_s"}
    common = {
        "pid": actors[str(event.get("actor"))],
        "tid": int(number(event.get("inc"))),
        "args": {name: value for name, value in event.items() if name not in header},
    }
    if event.get("kind") == "span":
        start, length = number(event.get("start")) - origin, number(event.get("dur_s"))
        name = str(event.get("name"))
        return {"ph": "X", "name": name, "ts": round(start * 1e6), "dur": round(length * 1e6), **common}
    moment = round((number(event.get("t")) - origin) * 1e6)
    return {"ph": "i", "s": "p", "name": str(event.get("kind")), "ts": moment, **common}
