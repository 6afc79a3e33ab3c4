"""The commands that change a run while it runs: parsing and words, as in `cli`."""

import sys
from pathlib import Path
from typing import Any

import click

_RUN = click.argument("run", type=click.Path(path_type=Path))


def _view(run: Path) -> Any:
    from launcher.runfolder import RunFolder  # noqa: PLC0415 - see the module `cli`
    from launcher.view import RunView  # noqa: PLC0415

    return RunView(RunFolder.open(run))


@click.command(
    "stop",
    help="""Stop a run and wait until it has stopped.

    \b
      relax-actor stop runs/mine

    Actors are stopped in order, on every host, as after Ctrl-C.
    """,
    epilog="Exit status: 0 nothing runs any more, 1 it still runs, 2 if RUN is not a run\nfolder.",
)
@_RUN
@click.option("--kill", is_flag=True, help="Do not wait for actors to stop: kill them.")
@click.option("--timeout", "timeout_s", type=float, metavar="S", help="Give up after S seconds.  [never]")
def _stop(run: Path, *, kill: bool, timeout_s: float | None) -> int:
    from launcher.observe import stop  # noqa: PLC0415 - see the module `cli`
    from launcher.runfolder import RunFolder  # noqa: PLC0415

    return stop(RunFolder.open(run), sys.stdout, kill=kill, timeout_s=timeout_s)


@click.command(
    "kill",
    short_help="Kill one actor of a run, on whichever host it is.",
    help="""Kill one actor of a run, on whichever host it is.

    \b
      relax-actor kill runs/mine rollout/3

    Its supervisor does what it does after any failure: mostly it starts the
    actor again. To have fewer rollouts, see `relax-actor scale`.
    """,
    epilog="Exit status: 0 it was killed, 1 the head refuses or does not answer, 2 if RUN is\n"
    "not a run that runs here, or has no such actor.",
)
@_RUN
@click.argument("actor")
def _kill(run: Path, actor: str) -> None:
    from launcher.operating import kill  # noqa: PLC0415 - see the module `cli`

    kill(_view(run), sys.stdout, actor)


@click.command(
    "scale",
    short_help="Change how many rollouts a run has.",
    help="""Change how many rollouts a run has, while it runs.

    \b
      relax-actor scale runs/mine 6

    N is how many there are to be. New ones sample as soon as they have the
    current policy version; those that are too many take no new prompts, finish
    their samples and end. Bounds are rollout.min_replicas and
    rollout.max_replicas.
    """,
    epilog="Exit status: 0 there are N, 1 there are not, or the head refuses, 2 if RUN is not\n"
    "a run that runs here.",
)
@_RUN
@click.argument("replicas", type=click.IntRange(0), metavar="N")
@click.option("--timeout", "timeout_s", type=float, metavar="S", help="Wait no longer.  [never]")
@click.option("--wait/--no-wait", "waits", default=True, help="Wait until there are N.  [wait]")
def _scale(run: Path, replicas: int, *, timeout_s: float | None, waits: bool) -> int:
    from launcher.operating import scale  # noqa: PLC0415 - see the module `cli`

    return scale(_view(run), sys.stdout, replicas, timeout_s=timeout_s, waits=waits)


ORDERS = (_stop, _kill, _scale)
