"""`relax-actor events` and `dead-letters`: the event log in words, chosen by kind and actor."""

import json
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TextIO

import msgspec

from launcher.columns import aligned
from launcher.errors import RunFolderError
from launcher.fields import nearest
from launcher.runstate import number
from launcher.view import RunView, read_some
from launcher.wording import clean
from relax_actor.telemetry import Event

POLL_S = 0.2
_HEADER = frozenset({"t", "m", "actor", "inc", "pid", "kind", "child", "incarnation"})
_KIND = re.compile(rb'"kind": ?"(\w+)"')


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which events are asked for."""

    kinds: tuple[str, ...] = ()  # any if empty
    actor: str = ""  # that it is about or from; any if empty

    @property
    def pattern(self) -> re.Pattern[bytes]:
        """What a line has that may be chosen."""
        return re.compile(
            rb'"kind": ?"(?:%s)"' % (b"|".join(re.escape(k.encode()) for k in self.kinds) or rb"\w+")
        )

    def takes(self, event: Event) -> bool:
        """Whether an event is asked for."""
        return not self.actor or self.actor in {event.get("child"), event.get("actor"), event.get("sender")}


def events(
    view: RunView, out: TextIO, choice: Choice, *, last: int = 50, follow: bool = False, as_json: bool = False
) -> None:
    """Print the newest events, oldest of them first.

    Args:
        view: of the run.
        out: where to.
        choice: which ones.
        last: how many of those there are.
        follow: go on until the run ends.
        as_json: print them as they are in the log, one JSON object a line.

    Raises:
        RunFolderError: no event of such a kind has happened, and none is waited for.
    """
    newest: deque[Event] = deque(maxlen=last)
    offset = 0
    for found, offset in _chosen(view, choice, 0):  # noqa: B007 - the last one is where to go on
        newest.extend(found)
    if not newest and last and not follow:
        raise RunFolderError(*_nothing(view, choice))
    _print(out, newest, as_json=as_json)
    while follow:
        is_running = view.is_running
        for found, offset in _chosen(view, choice, offset):  # noqa: B020, B007 - as above
            _print(out, found, as_json=as_json)
        if not is_running:
            return
        time.sleep(POLL_S)


def dead_letters(view: RunView, out: TextIO, *, as_json: bool = False) -> None:
    """Print the messages that nobody handled, newest last, and how many there were for which reason."""
    choice = Choice(kinds=("dead_letter",))
    letters = [event for found, _ in _chosen(view, choice, 0) for event in found]
    if as_json:
        out.write(json.dumps(letters) + "\n")
        return
    rows = [
        [_clock(each), _who(each), _text(each, "method"), _text(each, "sender"), _reason(each)]
        for each in letters
    ]
    if not rows:
        out.write("no dead letters\n")
        return
    out.writelines(f"{line}\n" for line in aligned(("at", "to", "method", "from", "why"), rows))


def event_line(event: Event) -> str:
    """Return an event as one line for people: when, what, who, and its fields."""
    fields = "  ".join(f"{name}={_value(value)}" for name, value in event.items() if name not in _HEADER)
    return clean(f"{_clock(event)}  {_text(event, 'kind'):<18} {_who(event):<16} {fields}").rstrip()


def _chosen(view: RunView, choice: Choice, offset: int) -> Iterator[tuple[list[Event], int]]:
    for found, end in read_some(view.folder.events, offset, choice.pattern):
        yield [event for event in found if choice.takes(event)], end


def _print(out: TextIO, found: Sequence[Event] | deque[Event], *, as_json: bool) -> None:
    out.writelines((json.dumps(event) if as_json else event_line(event)) + "\n" for event in found)
    out.flush()


def _nothing(view: RunView, choice: Choice) -> tuple[str, str]:
    known = sorted(_kinds(view))
    if unknown := [kind for kind in choice.kinds if kind not in known]:
        close = nearest(unknown[0], known)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(known) or 'no events yet'}"
        return f"`{view.folder.path}` has no event of the kind `{unknown[0]}`", hint
    return f"`{view.folder.path}` has no such event of `{choice.actor or 'any actor'}`", ""


def _kinds(view: RunView) -> set[str]:
    with view.folder.events.open("rb") as file:
        return {match[1].decode() for line in file if (match := _KIND.search(line))}


def _clock(event: Event) -> str:
    at = number(event.get("t"))
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03}"


def _who(event: Event) -> str:
    if "child" in event:
        incarnation = event.get("incarnation")
        return f"{event['child']}#{incarnation}" if incarnation else str(event["child"])
    return f"{event.get('actor', '?')}#{event.get('inc', '?')}"


def _reason(event: Event) -> str:
    lines = _text(event, "reason").strip().splitlines()
    return clean(lines[-1]) if lines else "-"


def _text(event: Event, name: str) -> str:
    return str(event.get(name, ""))


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return json.dumps(text) if isinstance(value, str) and (" " in text or not text) else text
