"""A rank's side of its gang: which group it is in, and how it leaves one that broke.

A broken collective may return without an error and with garbage (NCCL does), so a rank asks `check` after
every collective, before it uses the result; the runtime asks once more before an endpoint's result is sent.
While the group is broken the rank handles no calls and takes no step; they wait for the next group.
"""

import sys
import threading
from typing import Any

from relax_actor.actor.store import open_store
from relax_actor.actor.wire import Regroup
from relax_actor.errors import GangAborted

NEWS_S = 5.0
"""How long the news of a death may be behind the error that it brings to a neighbour's collective."""


class Gang:
    """The collective group this rank is in; `ctx.gang`. Read by user code, written by the runtime."""

    def __init__(self) -> None:
        self._group: Regroup | None = None
        self._aborted = 0  # the newest epoch that was aborted
        self._reason = ""
        self.breaks = 0  # how often a group broke
        self._broke = threading.Condition()
        self._store: Any = None  # of the newest epoch that this rank opened

    @property
    def epoch(self) -> int:
        """Which group this is, from 1; 0 before the first."""
        return self._group.epoch if self._group else 0

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._group.rank if self._group else 0

    @property
    def size(self) -> int:
        """How many ranks there are; 0 before the first group."""
        return self._group.size if self._group else 0

    @property
    def rendezvous(self) -> str:
        """Where the ranks of this epoch meet: an `init_method` for `torch.distributed.init_process_group`.

        Unless the actor's `open_rendezvous` has opened something else.
        """
        return self._group.rendezvous if self._group else ""

    @property
    def is_whole(self) -> bool:
        """Whether there is a group and nobody of it is known to be lost."""
        return self.epoch > self._aborted

    def check(self) -> None:
        """Raise if the group broke: what its last collective returned must not be used.

        Raises:
            GangAborted: it broke, or is not formed yet.
        """
        if not self.is_whole:
            raise self.aborted()

    def aborted(self) -> GangAborted:
        """Return the error that says why the newest group is no more."""
        return GangAborted(self.epoch, self._reason or "it is not formed yet")

    def open_store(self, host: str) -> str:
        """Open a store for a new epoch, as rank 0; the one before is closed when its group lets go of it.

        Args:
            host: the address that other ranks reach this one by.

        Returns:
            Its `init_method`; empty where there is no torch, whose store it is.
        """
        address, self._store = open_store(host)
        return address

    # -- the runtime's ---------------------------------------------------------------------------

    def abort(self, epoch: int, reason: str) -> None:
        """Note that a group broke, before its collectives are aborted."""
        with self._broke:
            self._aborted, self._reason = max(epoch, self._aborted), reason
            self.breaks += 1
            self._broke.notify_all()

    def broke_since(self, breaks: int, error: BaseException | None = None) -> bool:
        """Return whether a group broke since there were so many breaks.

        A collective may raise before the head has told this rank of the death behind it, so an error of the
        kind that libraries raise then waits for that news; without news it is an error like any other.
        """
        if isinstance(error, RuntimeError) and self.is_whole and self.size > 1:
            with self._broke:
                self._broke.wait_for(lambda: self.breaks != breaks, NEWS_S)
        return self.breaks != breaks

    def join(self, group: Regroup) -> None:
        """Note the next group."""
        self._group = group


def abort_collectives() -> None:
    """Abort every `torch.distributed` process group of this process, so that blocked collectives end.

    NCCL ends them at once, and without an error. Gloo closes its connections when the group's last user
    lets go of it: a rank outside a collective closes here, and its neighbours' collectives then raise, and
    theirs. A rank that keeps a group alive by a handle of its own overrides `Actor.on_gang_abort`.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    distributed.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch has no public name for it
