"""`relax-actor kill` and `scale`: what an operator has a running head do, over all its hosts."""

import time
from pathlib import Path
from typing import TextIO

from launcher.distant import order_head
from launcher.errors import OrderError, RunFolderError
from launcher.view import RunView
from relax_actor.actor.wire import Order, Ordered

ROLE = "rollout"
POLL_S = 0.2


def kill(view: RunView, out: TextIO, word: str) -> None:
    """Kill an actor, wherever it is, and say what its supervisor will do.

    Args:
        view: of the run.
        out: where to.
        word: the actor, such as `rollout/3`.

    Raises:
        RunFolderError: there is no such actor, or the run is not running here.
        OrderError: the head refuses, or does not answer.
    """
    name, incarnation = view.actor(word)
    life = view.lives.last(name)
    if life is not None and incarnation not in {None, life.incarnation}:
        raise RunFolderError(f"`{word}` is over", f"{name}#{life.incarnation} is the one that runs")
    _give(view, Order(id=1, what="kill", name=name))
    out.write(f"killed {life or name}; relax-actor why {_path(view)} {name} says what followed\n")


def scale(
    view: RunView, out: TextIO, replicas: int, *, timeout_s: float | None = None, waits: bool = True
) -> int:
    """Have a run sample with so many rollouts, and wait until it does.

    Args:
        view: of the run.
        out: where to say how far it has come.
        replicas: how many there are to be.
        timeout_s: how long to wait; None: as long as it takes.
        waits: whether to.

    Returns:
        0 where there are so many, or nobody waits for them; 1 where there are not.

    Raises:
        RunFolderError: the run is not running here.
        OrderError: the head refuses, or does not answer.
    """
    answer = _give(view, Order(id=1, what="scale", name=ROLE, replicas=replicas))
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    told = ""
    while True:
        if (line := _progress(answer, replicas)) != told:
            told = line
            out.write(f"{line}\n")
            out.flush()
        is_moving = bool(answer.starting or answer.leaving)
        if not waits or not is_moving:
            return 0 if is_moving or answer.replicas == replicas else 1
        if until_s is not None and time.monotonic() >= until_s:
            return 1
        time.sleep(POLL_S)
        answer = _give(view, Order(id=1, what="look", name=ROLE))


def _give(view: RunView, order: Order) -> Ordered:
    path = _path(view)
    if not view.is_here:
        raise RunFolderError(f"`{path}` runs on {view.lives.host}", f"run this command on {view.lives.host}")
    if not view.is_running or not view.lives.address:
        raise RunFolderError(f"`{path}` is not running", f"relax-actor status {path} says how it ended")
    answer = order_head(view.lives.address, order)
    if answer is None:
        raise OrderError("the head does not answer", f"relax-actor ps {path} says whether it is stopped")
    if answer.refusal:
        raise OrderError(answer.refusal, answer.hint)
    return answer


def _progress(answer: Ordered, replicas: int) -> str:
    """Say how far a change has come."""
    parts = [
        f"{', '.join(names)} {verb}"
        for names, verb in ((answer.starting, "starting"), (answer.leaving, "finishing what it has"))
        if names
    ]
    there = answer.replicas - len(answer.starting) - len(answer.leaving)
    count = f"{there} of {replicas} rollouts" if there < replicas else f"{there} rollouts"
    missing = "" if parts or there == replicas else "; see relax-actor events --kind child_refused"
    return f"{count}{''.join(f'; {part}' for part in parts)}{missing}"


def _path(view: RunView) -> Path:
    return view.folder.path
