"""Failures that a fresh start does not mend: how many of a kind in a row are enough."""

from relax_actor.supervision.events import ExitKind
from relax_actor.supervision.failure import Ending
from relax_actor.supervision.node import Node

OOM_RESTARTS = 2
"""How often a spec that ran out of memory is started again before it is called too large."""

DEVICE_RESTARTS = 1
"""How often an actor that lost its device is started again before the device is called dead."""


class Streak:
    """Out-of-memory ends in a row of one child spec, and device losses in a row of each of its actors."""

    def __init__(self) -> None:
        self._ooms = 0
        self._losses: dict[str, int] = {}

    def refusal(self, child: Node, ending: Ending, *, was_stable: bool) -> str:
        """Count one failure.

        Returns:
            Why the child is not to be started again, or nothing.
        """
        kind = ending.exit.kind
        self._ooms = (0 if was_stable else self._ooms) + 1 if kind is ExitKind.OOM else 0
        losses = (0 if was_stable else self._losses.get(child.name, 0)) + 1
        self._losses[child.name] = losses if kind is ExitKind.DEVICE_LOST else 0
        if child.repeats(ending):
            return f"`{child.name}` failed twice with the same `__init__` error"
        if self._ooms > OOM_RESTARTS:
            return f"`{child.name}` ran out of memory {self._ooms} times in a row"
        if self._losses[child.name] > DEVICE_RESTARTS:
            return f"`{child.name}` lost its device {losses} times in a row"
        return ""
