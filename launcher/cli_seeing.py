"""The commands that look into a run: parsing and words, as in `cli`.

They read the run folder, the actors' shared memory and /proc, never the head, so that they work while it
hangs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_RUN = click.argument("run", type=click.Path(path_type=Path))
_ACTOR = click.argument("actor")
_STATUS = "Exit status: 0; 2 if RUN is not a run folder"


def _json(what: str) -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what}.")


def _view(run: Path) -> Any:
    from launcher.runfolder import RunFolder  # noqa: PLC0415 - see the module `cli`
    from launcher.view import RunView  # noqa: PLC0415

    return RunView(RunFolder.open(run))


@click.command(
    "status",
    short_help="Show where a run stands.",
    help="""Show where a run stands: its actors, its loop, its latest events.

    \b
      relax-actor status runs/mine --follow
    """,
    epilog=f"{_STATUS}.",
)
@_RUN
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@_json("one JSON object")
def _status(run: Path, *, follow: bool, as_json: bool) -> None:
    from launcher.observe import follow_status, status  # noqa: PLC0415 - see the module `cli`
    from launcher.runfolder import RunFolder  # noqa: PLC0415

    folder = RunFolder.open(run)
    if follow:
        follow_status(folder, sys.stdout)
    else:
        status(folder, sys.stdout, as_json=as_json)


@click.command(
    "ps",
    short_help="List the actors of a run and what each is doing.",
    help="""List the actors of a run: state, process, what each is doing.

    \b
      relax-actor ps runs/mine

    `cpu` is over the life of the process. A state `stopped` is SIGSTOP; `gone`
    is dead, but the head has not said so.
    """,
    epilog=f"{_STATUS}.",
)
@_RUN
@_json("a JSON array with an object for each actor")
def _ps(run: Path, *, as_json: bool) -> None:
    from launcher.ps import ps  # noqa: PLC0415 - see the module `cli`

    ps(_view(run), sys.stdout, as_json=as_json)


@click.command(
    "tree",
    short_help="Show the supervision tree of a run.",
    help="""Show the supervision tree of a run, each node with its state.

    \b
      relax-actor tree runs/mine
    """,
    epilog=f"{_STATUS}.",
)
@_RUN
@_json("nested JSON objects")
def _tree(run: Path, *, as_json: bool) -> None:
    from launcher.ps import tree  # noqa: PLC0415 - see the module `cli`

    tree(_view(run), sys.stdout, as_json=as_json)


@click.command(
    "top",
    help="""Watch what the actors of a run use, the busiest first.

    \b
      relax-actor top runs/mine --interval 1

    Ends with the run, or by Ctrl-C.
    """,
    epilog=f"{_STATUS}.",
)
@_RUN
@click.option(
    "--interval",
    "interval_s",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1),
    metavar="S",
    help="Seconds between two looks.",
)
@click.option("-n", "looks", type=click.IntRange(1), metavar="N", help="End after N looks.")
def _top(run: Path, *, interval_s: float, looks: int | None) -> None:
    from launcher.top import top  # noqa: PLC0415 - see the module `cli`

    top(_view(run), sys.stdout, interval_s=interval_s, looks=looks)


@click.command(
    "why",
    short_help="Say why an actor ended, from its first cause on.",
    help="""Say why an actor ended, beginning with what it followed from.

    \b
      relax-actor why runs/mine rollout/3
      relax-actor why runs/mine rollout/3#2

    The first line is the first cause. ACTOR#N is its Nth start; without #N it
    is the newest one that ended, or, where none did, the one that runs.
    """,
    epilog=f"{_STATUS} or has no such ACTOR.",
)
@_RUN
@_ACTOR
@_json("one JSON object")
def _why(run: Path, actor: str, *, as_json: bool) -> None:
    from launcher.why import why  # noqa: PLC0415 - see the module `cli`

    why(_view(run), sys.stdout, actor, as_json=as_json)


@click.command(
    "stack",
    help="""Print what every thread of an actor is doing right now.

    \b
      relax-actor stack runs/mine trainer

    The actor dumps its Python stacks into its own log, also while it is busy
    or deadlocked; it goes on undisturbed.
    """,
    epilog=f"{_STATUS}, ACTOR does not run\non this host, or it did not answer.",
)
@_RUN
@_ACTOR
@click.option("--native", is_flag=True, help="Native frames too, by py-spy, if installed.")
@click.option(
    "--timeout", "timeout_s", default=5.0, show_default=True, metavar="S", help="Wait no longer for it."
)
@_json("a JSON array of threads")
def _stack(run: Path, actor: str, *, native: bool, timeout_s: float, as_json: bool) -> None:
    from launcher.stack import native_stack, stack  # noqa: PLC0415 - see the module `cli`

    if native:
        native_stack(_view(run), sys.stdout, actor)
    else:
        stack(_view(run), sys.stdout, actor, timeout_s=timeout_s, as_json=as_json)


@click.command(
    "events",
    help="""Print what happened in a run, one line an event.

    \b
      relax-actor events runs/mine --kind child_exited --kind child_restarting
      relax-actor events runs/mine --actor rollout/3 -f
    """,
    epilog=f"{_STATUS} or has no such event.",
)
@_RUN
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only this kind; may be repeated.")
@click.option("--actor", default="", metavar="ACTOR", help="Only what is about or from it.")
@click.option(
    "-n", "last", default=50, show_default=True, type=click.IntRange(0), metavar="N", help="How many."
)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@_json("one JSON object a line, as in events.jsonl")
def _events(run: Path, *, kinds: tuple[str, ...], actor: str, last: int, follow: bool, as_json: bool) -> None:
    from launcher.eventview import Choice, events  # noqa: PLC0415 - see the module `cli`

    view = _view(run)
    name = view.actor(actor)[0] if actor and actor not in {"head", "agent"} else actor
    choice = Choice(kinds=kinds, actor=name)
    events(view, sys.stdout, choice, last=last, follow=follow, as_json=as_json)


@click.command(
    "dead-letters",
    help="""List the messages that no actor handled, and why.

    \b
      relax-actor dead-letters runs/mine
    """,
    epilog=f"{_STATUS}.",
)
@_RUN
@_json("a JSON array of events")
def _dead_letters(run: Path, *, as_json: bool) -> None:
    from launcher.eventview import dead_letters  # noqa: PLC0415 - see the module `cli`

    dead_letters(_view(run), sys.stdout, as_json=as_json)


@click.command(
    "logs",
    help="""Print what actors wrote, each line with its actor before it.

    \b
      relax-actor logs runs/mine rollout/0 -f

    ACTOR is a name such as rollout/0, or a role for all its replicas. With -f,
    equal lines that replicas write within a second are shown once, as
    `rollout/{0-3,5}#1`; nothing else is merged, and the files have it all.
    """,
    epilog=f"{_STATUS} or ACTOR has no log.",
)
@_RUN
@click.argument("actor", default="")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option(
    "-n",
    "last",
    default=20,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="So many lines of each log.",
)
@click.option(
    "--limit",
    "limit_kib",
    type=click.IntRange(0),
    metavar="KIB",
    help="With -f show no more of a log in a second; 0 shows all.  [256 on a terminal, else 0]",
)
def _logs(run: Path, actor: str, *, follow: bool, last: int, limit_kib: int | None) -> None:
    from launcher.runfolder import RunFolder  # noqa: PLC0415 - see the module `cli`
    from launcher.taglog import LIMIT_BYTES_PER_S, logs  # noqa: PLC0415

    default = LIMIT_BYTES_PER_S if sys.stdout.isatty() else None
    limit = default if limit_kib is None else (limit_kib * 1024.0 or None)
    folder = RunFolder.open(run)
    logs(folder, sys.stdout, actor=actor, last=last, follow=follow, limit_bytes_per_s=limit)


COMMANDS = (_status, _ps, _tree, _top, _why, _stack, _events, _dead_letters, _logs)
