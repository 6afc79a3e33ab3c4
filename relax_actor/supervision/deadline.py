"""The deadline of a whole stop: what is not gone by then is killed."""

from relax_actor.supervision.branch import Branch
from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.desk import Desk


class StopDeadline:
    """Bounds how long the root may take to come down.

    Args:
        root: what comes down.
        desk: where its timer is.
        total_s: how long it may take, in seconds; None: as long as its children's own deadlines add up to.
    """

    def __init__(self, root: Branch, desk: Desk, total_s: float | None) -> None:
        self._root, self._desk, self._total_s = root, desk, total_s
        self._timer = ""
        self._is_over = False

    def watch(self) -> None:
        """Begin to count once the root comes down, and end with it."""
        if self._total_s is None or self._is_over:
            return
        if self._timer and not self._root.is_alive:
            self._desk.cancel_timer(self._timer)
            self._timer = ""
        elif not self._timer and self._root.is_closing and self._root.is_alive:
            self._timer = f"{self._root.name}:stop_total"
            self._desk.set_timer(self._timer, self._total_s, self)

    def timer_fired(self) -> None:
        """Kill whoever is left."""
        self._timer, self._is_over = "", True
        late = [leaf for leaf in self._root.leaves() if leaf.is_alive]
        self._desk.killed += [f"{leaf.name}#{leaf.incarnation}" for leaf in late if not leaf.is_killed]
        self._desk.report(
            ReportKind.STOP_OVERDUE,
            supervisor=self._root.name,
            after_s=self._total_s,
            children=[leaf.name for leaf in late],
        )
        for leaf in reversed(late):
            leaf.kill()
