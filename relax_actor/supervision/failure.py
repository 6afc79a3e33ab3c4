"""How a child's end is remembered and told: the first failure leads, however many follow it."""

from collections import Counter, deque
from dataclasses import dataclass

from relax_actor.supervision.commands import Cause
from relax_actor.supervision.events import Exit, ExitKind
from relax_actor.supervision.spec import Intensity

HOST_LOSS_S = 1.0
"""The actors of a lost host are declared gone within so long of one another."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a child ended, and the failures of actors that led to it."""

    exit: Exit
    first: Cause
    last: Cause
    init_error: str = ""
    """What `__init__` raised, where that is what ended it."""


@dataclass(frozen=True, kw_only=True)
class _Restart:
    child: str
    at_s: float
    cause: Cause  # a supervisor's may be much older than its restart


class Window:
    """The restarts a supervisor made lately, oldest first."""

    def __init__(self, intensity: Intensity) -> None:
        self._intensity = intensity
        self._restarts: deque[_Restart] = deque()

    def add(self, child: str, cause: Cause, now: float) -> None:
        """Count one restart, and forget those that have left the window.

        A host that is lost takes many actors with it: that is one restart.
        """
        if cause.child == child and self._is_same_host_loss(cause):
            return
        self._restarts.append(_Restart(child=child, at_s=now, cause=cause))
        while now - self._restarts[0].at_s > self._intensity.within_s:
            self._restarts.popleft()

    def _is_same_host_loss(self, cause: Cause) -> bool:
        lost = [each.cause for each in self._restarts if each.cause.exit.kind is ExitKind.LEASE]
        is_lost = cause.exit.kind is ExitKind.LEASE
        return is_lost and bool(lost) and cause.at_s - lost[-1].at_s <= HOST_LOSS_S

    @property
    def is_exceeded(self) -> bool:
        """Whether there were more restarts than the intensity allows."""
        return len(self._restarts) > self._intensity.restarts

    @property
    def is_empty(self) -> bool:
        """Whether nothing was restarted lately."""
        return not self._restarts

    @property
    def first_cause(self) -> Cause:
        """The oldest failure in the window, which most often is behind the others."""
        return self._restarts[0].cause

    def describe(self) -> str:
        """Return who needed how many restarts, against which limit."""
        counts = Counter(restart.child for restart in self._restarts)
        total, limit = len(self._restarts), self._intensity
        who = ", ".join(f"`{child}`" + (f" ({n})" if len(counts) > 1 else "") for child, n in counts.items())
        plural = "" if total == 1 else "s"
        return f"{who} needed {total} restart{plural} in {limit.within_s:g} s (limit {limit.restarts})"


def own_ending(child: str, incarnation: int, exit_: Exit, now: float, *, init_error: str = "") -> Ending:
    """Return the ending of a child that was nobody else's doing."""
    cause = Cause(child=child, incarnation=incarnation, exit=exit_, at_s=now)
    return Ending(exit=exit_, first=cause, last=cause, init_error=init_error)


def failure_text(ending: Ending) -> str:
    """Return what a person reads of a failed supervisor: what it decided, the first failure, the last."""
    lines = [ending.exit.detail, f"  first exit: {ending.first}"]
    if ending.last != ending.first:
        lines.append(f"  last exit: {ending.last}")
    return "\n".join(lines)
