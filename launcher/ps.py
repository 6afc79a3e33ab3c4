"""`relax-actor ps` and `tree`: one row an actor, from its log, its process and its status page."""

import json
from collections.abc import Iterator
from typing import TextIO

import msgspec

from launcher.causes import how
from launcher.columns import aligned, duration, size
from launcher.lives import ALIVE, Life, Outline, Phase
from launcher.view import RunView
from launcher.wording import clean
from relax_actor.node.facts import ProcessFacts
from relax_actor.node.sight import Sight

_RIGHT = frozenset({"inc", "pid", "cpu", "rss", "mailbox", "restarts"})
_HEADER = ("actor", "state", "inc", "pid", "host", "cpu", "rss", "doing", "mailbox", "restarts", "last exit")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One actor now; what cannot be known is None."""

    actor: str
    state: str
    """Its phase; `stopped` where a signal has stopped it, `gone` where it is dead and nobody has said so."""
    incarnation: int = 0
    pid: int | None = None
    host: str = ""
    cpu_frac: float | None = None  # 1.0 is one core
    rss_bytes: int | None = None
    method: str = ""
    method_s: float | None = None  # how long it has been in it
    mailbox: int | None = None
    progress: str = ""
    restarts: int = 0
    last_exit: str = ""


class CpuMeter:
    """CPU shares between two looks; at the first look over the process' whole life."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}

    def frac(self, facts: ProcessFacts) -> float:
        """Return how many cores a process used since the last look."""
        key, now = (facts.pid, facts.start_ticks), (facts.cpu_s, facts.age_s)
        cpu_s, age_s = self._seen.get(key, (0.0, 0.0))
        self._seen[key] = now
        return (now[0] - cpu_s) / (now[1] - age_s) if now[1] > age_s else facts.cpu_frac


def rows(view: RunView, meter: CpuMeter | None = None) -> list[Row]:
    """Return a row for every actor of a run, in the order of its tree."""
    meter = meter or CpuMeter()
    return [_row(view, name, meter) for name in view.lives.names]


def ps(view: RunView, out: TextIO, *, as_json: bool = False) -> None:
    """Print a table of the actors, under a line about the head; or a JSON array of rows."""
    table = rows(view)
    if as_json:
        out.write(msgspec.json.encode(table).decode() + "\n")
        return
    out.writelines(f"{line}\n" for line in [clean(view.head_line), "", *table_lines(table)])


def table_lines(table: list[Row]) -> list[str]:
    """Return the rows as lines of text, a header first."""
    return aligned(_HEADER, [_cells(row) for row in table], _RIGHT)


def tree(view: RunView, out: TextIO, *, as_json: bool = False) -> None:
    """Print the supervision tree with the state of everything in it."""
    by_name = {row.actor: row for row in rows(view)}
    outline = view.lives.outline or Outline(
        name="?", children=[Outline(name=name) for name in view.lives.names]
    )
    if as_json:
        out.write(json.dumps(_nested(view, outline, by_name)) + "\n")
        return
    out.writelines(f"{line}\n" for line in aligned(*_tree_table(view, outline, by_name)))


def _row(view: RunView, name: str, meter: CpuMeter) -> Row:
    life = view.lives.last(name)
    if life is None:
        return Row(actor=name, state=Phase.WAITING)
    sight = view.sight(life) if life.phase in ALIVE else None
    facts = sight.facts if sight else None
    page = sight.page if sight and facts else None
    return Row(
        actor=name,
        state=_state(view, life, sight),
        incarnation=life.incarnation,
        pid=facts.pid if facts else None,
        host=life.host,
        cpu_frac=meter.frac(facts) if facts else None,
        rss_bytes=facts.rss_bytes if facts else None,
        method=page.method if page else "",
        method_s=sight.in_method_s if sight and page else None,
        mailbox=page.mailbox_messages if page else None,
        progress=page.progress if page else "",
        restarts=len(view.lives.actors[name]) - 1,
        last_exit=_last_exit(view, name),
    )


def _state(view: RunView, life: Life, sight: Sight | None) -> str:
    if sight is None:  # out of sight, or over
        return life.phase
    if sight.facts is None:
        return "gone" if view.is_here else life.phase
    return "stopped" if sight.facts.is_stopped else life.phase


def _last_exit(view: RunView, name: str) -> str:
    over = [life for life in view.lives.actors[name] if life.is_over]
    return how(over[-1]) if over else ""


def _cells(row: Row) -> list[str]:
    doing = f"{row.method} {duration(row.method_s)}" if row.method_s is not None else ""
    return [
        clean(row.actor),
        row.state,
        str(row.incarnation or "-"),
        _known(row.pid),
        clean(row.host) or "-",
        "-" if row.cpu_frac is None else f"{row.cpu_frac:.0%}",
        "-" if row.rss_bytes is None else size(row.rss_bytes),
        clean(" ".join(filter(None, (doing, row.progress)))) or "-",
        _known(row.mailbox),
        str(row.restarts),
        clean(row.last_exit)[:80] or "-",
    ]


def _known(value: int | None) -> str:
    return "-" if value is None else str(value)


def _nested(view: RunView, outline: Outline, by_name: dict[str, Row]) -> dict[str, object]:
    if outline.children is None:
        return msgspec.to_builtins(by_name[outline.name])  # type: ignore[no-any-return]  # a struct is a dict
    below = [_nested(view, child, by_name) for child in outline.children]
    return {"supervisor": outline.name, "state": _supervisor_state(view, outline.name), "children": below}


def _supervisor_state(view: RunView, name: str) -> str:
    found = view.lives.supervisors.get(name)
    return found.phase if found else Phase.STARTING


def _tree_table(
    view: RunView, outline: Outline, by_name: dict[str, Row]
) -> tuple[tuple[str, ...], list[list[str]]]:
    table = []
    for drawn, node in _drawn(outline):
        if node.children is None:
            row = by_name[node.name]
            end = clean(row.last_exit)[:80] or "-"
            table.append([drawn, row.state, str(row.incarnation or "-"), _known(row.pid), end])
        else:
            supervisor = view.lives.supervisors.get(node.name)
            reason = clean(supervisor.reason) if supervisor else ""
            table.append([drawn, _supervisor_state(view, node.name), "", "", reason or "-"])
    return ("tree", "state", "inc", "pid", "last exit"), table


def _drawn(outline: Outline, first: str = "", rest: str = "") -> Iterator[tuple[str, Outline]]:
    yield f"{first}{clean(outline.name)}", outline
    children = outline.children or []
    for index, child in enumerate(children):
        is_last = index == len(children) - 1
        branch, beyond = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield from _drawn(child, rest + branch, rest + beyond)
