"""What an engine with a server tells the actor around it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _nothing(*_: Any, **__: Any) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What an engine tells the actor around it."""

    wake: Callable[[], None] = _nothing  # from any thread: there is something for `step`
    progress: Callable[[str], None] = _nothing  # how far it has come
    emit: Callable[..., None] = _nothing  # an event: its kind, and its fields
    remember: Callable[[Iterable[Path]], None] = _nothing  # files that outlive a server that is killed
    gone: Callable[[str], None] = _nothing  # from any thread: a process of the server has ended
    closing: Callable[[], None] = _nothing  # the server is about to be killed
