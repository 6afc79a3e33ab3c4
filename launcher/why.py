"""`relax-actor why`: how an actor ended, what that followed from, and where to read on."""

import json
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

from launcher.causes import Link, chain, how
from launcher.columns import aligned, duration
from launcher.errors import RunFolderError
from launcher.hints import hint
from launcher.lives import ALIVE, Life
from launcher.view import RunView
from launcher.wording import clean
from relax_actor.files import log_tail
from relax_actor.node.sight import Sight
from relax_actor.stacks import is_dump_line
from relax_actor.supervision.events import signal_name

SHOWN_LINES = 10


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """All that `why` says of one incarnation."""

    actor: str
    incarnation: int
    state: str
    line: str  # what a person reads first
    exit: str = ""  # its kind
    code: int | None = None
    signal: int | None = None
    method: str = ""  # that it was in
    method_s: float | None = None
    call_id: int | None = None
    lived_s: float | None = None
    next: str = ""  # what became of the actor
    chain: tuple[Link, ...] = ()  # first cause first, its own end last
    earlier: tuple[str, ...] = ()  # ends of earlier incarnations
    log: str = ""
    last_lines: tuple[str, ...] = ()
    crash: tuple[str, ...] = ()  # files and folders
    hint: str = ""


def why(view: RunView, out: TextIO, word: str, *, as_json: bool = False) -> None:
    """Print why an actor ended; of one that runs, how it is and how it ended before.

    Args:
        view: of the run.
        out: where to.
        word: the actor, or one incarnation of it as `rollout/3#2`.
        as_json: print one JSON object.

    Raises:
        RunFolderError: there is no such actor, or it has not been started.
    """
    found = verdict(view, word)
    if as_json:
        out.write(json.dumps(msgspec.to_builtins(found)) + "\n")
    else:
        out.writelines(f"{line}\n" for line in _told(found))


def verdict(view: RunView, word: str) -> Verdict:
    """Gather what is known of the end of an actor; see `why`."""
    name, incarnation = view.actor(word)
    life = _chosen(view, name, incarnation)
    is_dead = view.is_gone(life)
    sight = view.sight(life) or Sight()
    page = sight.page
    traceback = view.folder.crash_path(name, life.incarnation, ".txt")
    return Verdict(
        actor=name,
        incarnation=life.incarnation,
        state=life.phase if life.is_over or not is_dead else "gone",
        line=_line(view, life, is_dead=is_dead),
        exit=life.kind,
        code=life.code,
        signal=life.signal,
        method=page.method if page else "",
        method_s=_in_method_s(life, sight),
        call_id=page.call_id if page and page.method else None,
        lived_s=life.ended_at - life.spawned_at if life.is_over and life.spawned_at else None,
        next=_next(view, life),
        chain=tuple(chain(view.lives, life)) if life.is_over else (),
        earlier=_earlier(view, life),
        log=life.log,
        last_lines=_last_lines(life) if view.is_near(life) else sight.log[-SHOWN_LINES:],
        crash=_crash(view, life) if view.is_near(life) else sight.crash,
        hint=hint(life, has_traceback=traceback.exists() or sight.has_traceback)
        if life.is_over
        else _hint_of_the_living(view, life),
    )


def _chosen(view: RunView, name: str, incarnation: int | None) -> Life:
    """Return the incarnation asked for, or the newest that is over, or the one that runs."""
    lives = view.lives.actors.get(name, [])
    if incarnation is not None:
        return next(life for life in lives if life.incarnation == incarnation)
    if not lives:
        raise RunFolderError(f"`{name}` has not been started yet", f"relax-actor tree {view.folder.path}")
    is_lost = lives[-1].phase in ALIVE and view.is_gone(lives[-1]) and view.is_here
    over = [life for life in lives if life.is_over]
    return lives[-1] if is_lost or not over else over[-1]


def _in_method_s(life: Life, sight: Sight) -> float | None:
    """Return how long it was in its method when it ended, or has been."""
    until = sight.in_method_s
    if until is None or not life.is_over:
        return until
    return max(0.0, until - (time.time() - life.ended_at))


def _line(view: RunView, life: Life, *, is_dead: bool) -> str:
    if life.line:
        return life.line
    who = f"{life.name} (incarnation {life.incarnation}, pid {life.pid})"
    if life.is_over:
        return f"{who} died: {how(life)}; log: {life.log}"
    if is_dead:
        return f"{who} is gone, and the head has not said how ({view.head_line}); log: {life.log}"
    return f"{who} runs: {life.phase} since {_clock(life.ready_at or life.spawned_at)}; log: {life.log}"


def _next(view: RunView, life: Life) -> str:
    after = view.lives.life(life.name, life.incarnation + 1)
    if after is not None:
        ready = f", ready after {duration(after.ready_at - after.spawned_at)}" if after.ready_at else ""
        return f"started again as {after}{ready}"
    if life.delay_s is not None:
        return f"to be started again {duration(life.delay_s)} after its end"
    return f"not started again ({life.phase})" if life.is_over else ""


def _earlier(view: RunView, life: Life) -> tuple[str, ...]:
    before = [
        each for each in view.lives.actors[life.name] if each.incarnation < life.incarnation and each.is_over
    ]
    return tuple(f"{_clock(each.ended_at)}  {each}  {how(each)}" for each in before)


def _last_lines(life: Life) -> tuple[str, ...]:
    own = [line for line in log_tail(Path(life.log)) if not is_dump_line(line)] if life.log else []
    return tuple(own[-SHOWN_LINES:])


def _crash(view: RunView, life: Life) -> tuple[str, ...]:
    candidates = [view.folder.crash_path(life.name, life.incarnation, end) for end in ("", ".txt", ".json")]
    return tuple(str(path) for path in candidates if path.exists())


def _hint_of_the_living(view: RunView, life: Life) -> str:
    facts = view.process(life)
    if facts is None:
        return "it ends where the head goes on, or is killed" if view.head() else ""
    command = f"relax-actor stack {view.folder.path} {life.name}"
    return f"kill -CONT {life.pid} lets it go on" if facts.is_stopped else f"{command} shows what it is doing"


def _told(found: Verdict) -> list[str]:
    first = found.chain[0] if found.chain else None
    is_own = first is None or first.who == f"{found.actor}#{found.incarnation}"
    lines = [clean(found.line if is_own or first is None else first.line or f"{first.who}: {first.what}")]
    if not is_own:
        table = [[_clock(link.at), clean(link.who), clean(link.what)] for link in found.chain]
        lines += [
            "",
            "what followed from it:",
            *(f"  {line}" for line in aligned(("at", "who", "how"), table)),
        ]
        lines += ["", clean(found.line)]
    lines += ["", *_facts(found)]
    if found.earlier:
        lines += ["", "ends before that:", *(f"  {clean(each)}" for each in found.earlier)]
    if found.last_lines:
        lines += ["", "last lines of its log:", *(f"  {clean(line)}" for line in found.last_lines)]
    return [*lines, *(["", f"hint: {clean(found.hint)}"] if found.hint else [])]


def _facts(found: Verdict) -> list[str]:
    code = f", exit code {found.code}" if found.code is not None else ""
    number = f", {signal_name(found.signal)} ({found.signal})" if found.signal is not None else ""
    facts: list[tuple[str, Any]] = [
        ("exit", f"{found.exit or 'unknown'}{code}{number}" if found.lived_s is not None else ""),
        ("lived", duration(found.lived_s) if found.lived_s is not None else ""),
        (
            "in",
            f"{found.method}, call {found.call_id}, for {duration(found.method_s or 0.0)}"
            if found.method
            else "",
        ),
        ("then", found.next),
        ("log", found.log),
        *(("crash", path) for path in found.crash),
    ]
    return [f"{name:<7}{clean(value)}" for name, value in facts if value]


def _clock(at: float) -> str:
    """Return a moment as local time with milliseconds."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03}"
