"""What an actor's end followed from: the chain of failures, the first cause first. Pure.

Links are facts of the event log, never a guess from times that lie close together:

- its supervisor restarted it together with another child that failed (`child_restarting.also`);
- a supervisor above it gave up (`escalated`), and that followed from the last failure below that one;
- the node agent of its host died, and with it all its actors;
- the error it died of names another actor's death (`ActorDied`), which came before;
- the node agent, or its supervisor, killed it for a reason.
"""

import re
from collections.abc import Iterator

import msgspec

from launcher.lives import Life, Lives
from launcher.runstate import number
from relax_actor.supervision.events import signal_name
from relax_actor.telemetry import Event

_DIED = re.compile(r"(?P<name>[\w/-]+) \(incarnation (?P<incarnation>\d+)\) died: ")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of a chain."""

    at: float  # unix seconds
    who: str  # `rollout/3#2`, or a supervisor, or `agent`
    what: str
    line: str = ""  # the death line, where an actor died
    log: str = ""


def chain(lives: Lives, life: Life) -> list[Link]:
    """Return what led to an incarnation's end, by time, its own end last.

    Args:
        lives: of the run.
        life: one that is over.
    """
    found: dict[str, Link] = {}
    _collect(lives, life, found)
    return sorted(found.values(), key=lambda link: link.at)


def how(life: Life) -> str:
    """Say how an incarnation ended, also where only its node agent has told."""
    if life.reason:
        return life.reason
    if life.signal is not None:
        return signal_name(life.signal)
    return "unknown" if life.code is None else f"exit code {life.code}"


def _collect(lives: Lives, life: Life, found: dict[str, Link]) -> None:
    if str(life) in found:
        return
    what = f"{how(life)} ({life.killed})" if life.killed else how(life)
    found[str(life)] = Link(at=life.ended_at, who=str(life), what=what, line=life.line, log=life.log)
    for cause in _named_in(lives, life):
        _collect(lives, cause, found)
    for event in _events_in(lives, life):
        _follow(lives, event, found)


def _named_in(lives: Lives, life: Life) -> Iterator[Life]:
    """Yield the deaths that the error it died of speaks of."""
    for match in _DIED.finditer(life.reason):
        cause = lives.life(match["name"], int(match["incarnation"]))
        if cause is not None and cause is not life and cause.is_over and cause.ended_at <= life.ended_at:
            yield cause


def _events_in(lives: Lives, life: Life) -> Iterator[Event]:
    """Yield the events of its lifetime that took it down."""
    above = set(lives.outline.path_to(life.name)) if lives.outline else set()
    for event in lives.links:
        at = number(event.get("t"))
        if not life.spawned_at <= at <= life.ended_at:
            continue
        also = event.get("also")
        is_together = isinstance(also, list) and bool(({life.name} | above) & set(map(str, also)))
        is_host_lost = event.get("kind") == "host_lost" and life.kind == "lease"
        if (
            is_together
            or is_host_lost
            or (event.get("kind") == "escalated" and str(event.get("supervisor")) in above)
        ):
            yield event


def _follow(lives: Lives, event: Event, found: dict[str, Link]) -> None:
    at = number(event.get("t"))
    if event.get("kind") == "host_lost":
        who = f"host {event.get('host')}"
        what = f"lost with its {event.get('actors')} actors: {event.get('reason')}"
        found[who] = Link(at=at, who=who, what=what)
        return
    if event.get("kind") == "escalated":
        who = str(event.get("supervisor"))
        found.setdefault(who, Link(at=at, who=who, what=str(event.get("reason"))))
        failed = _last_failure(lives, _below(lives, who), at)
    else:
        failed = _last_failure(lives, _below(lives, str(event.get("child"))), at)
    if failed is not None:
        _collect(lives, failed, found)


def _below(lives: Lives, name: str) -> set[str]:
    """Return the actors that a name stands for: itself, or all below a supervisor."""
    if lives.outline is not None:
        waiting = [lives.outline]
        while waiting:
            node = waiting.pop()
            if node.name == name:
                return set(node.actors())
            waiting += node.children or []
    return {name}


def _last_failure(lives: Lives, names: set[str], at: float) -> Life | None:
    """Return the newest failure among the actors until a moment."""
    failures = [
        life
        for name in names
        for life in lives.actors.get(name, ())
        if life.is_failure and life.ended_at <= at
    ]
    return max(failures, key=lambda life: life.ended_at, default=None)
