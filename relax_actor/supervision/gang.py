"""A gang: the replicas of one child as ranks that meet in collectives, and the epochs of their group.

The first death breaks the group of all. The survivors' collectives are aborted at once; a survivor that
is back at its mailbox in time keeps its process and its memory, the others are killed. When every rank is
ready again, all join a new group under the next epoch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.states import ChildState

if TYPE_CHECKING:
    from relax_actor.supervision.leaf import Leaf


class Gang:
    """The collective group of one child's replicas.

    Args:
        id_: the child's id.
        desk: counts its epochs, which never repeat.
    """

    def __init__(self, id_: str, desk: Desk) -> None:
        self._id, self._desk = id_, desk
        self._is_whole = False

    def abort(self, ranks: Sequence["Leaf"], lost: "Leaf", reason: str) -> None:
        """Get the surviving ranks out of their collectives, once an epoch."""
        if not self._is_whole:
            return
        self._is_whole = False
        survivors = [rank for rank in ranks if rank is not lost and rank.state is ChildState.READY]
        for rank in ranks:
            rank.reset()  # one that had ended is a rank of the next group again
        for rank in survivors:
            rank.abort(self._epoch, f"`{lost.name}` {reason}")
        self._desk.report(
            ReportKind.GANG_ABORTED,
            gang=self._id,
            epoch=self._epoch,
            child=lost.name,
            survivors=[rank.name for rank in survivors],
            reason=reason,
        )

    def disband(self) -> None:
        """Note that the ranks are stopped together: they join a new group when they are started again."""
        self._is_whole = False

    def form(self, ranks: Sequence["Leaf"]) -> None:
        """Have all ranks join the next epoch's group, as soon as all of them are ready and released."""
        if self._is_whole or not all(rank.is_free for rank in ranks):
            return
        self._is_whole = True
        epoch = self._desk.next_incarnation(self._counter)
        for rank in ranks:
            rank.regroup(self._id, epoch, len(ranks))
        self._desk.report(
            ReportKind.GANG_FORMED, gang=self._id, epoch=epoch, ranks=[rank.name for rank in ranks]
        )

    @property
    def _epoch(self) -> int:
        return self._desk.incarnations[self._counter]

    @property
    def _counter(self) -> str:
        return f"{self._id}.gang"  # no actor's name has a dot
