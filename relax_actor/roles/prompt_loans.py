"""How a rollout gets prompts without waiting: it asks, has their rows brought, and looks at both later."""

from relax_actor.actor import Context, Ref, Reply
from relax_actor.ids import LeaseId, PolicyVersion
from relax_actor.protocol import Leased, TensorRef
from relax_actor.roles.queue import TransferQueue
from relax_actor.roles.rows import Arrival, Rows
from relax_actor.transfer_queue.storage import refs_of

PARK_S = 20.0
"""How long a request for prompts waits in the queue before it is asked again."""


class PromptLoans:
    """The prompts that are on their way to a rollout; it asks for more only when there are none.

    Args:
        queue: lends them.
        rows: the way of their bytes.
        context: of the rollout.
    """

    def __init__(self, queue: Ref[TransferQueue], rows: Rows, context: Context) -> None:
        self._queue, self._rows, self._context = queue, rows, context
        self._asking: Reply[Leased] | None = None
        self._arriving: tuple[Leased, Arrival] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._asking is None and self._arriving is None

    def ask(self, version: PolicyVersion | None, held: list[LeaseId], slots: int) -> None:
        """Ask for prompts.

        Args:
            version: what they would be sampled with.
            held: the leases that this rollout has; the queue takes back all others.
            slots: how many samples there is room for.
        """
        self._asking = self._queue.within(PARK_S * 2).ask(
            TransferQueue.lease_prompts, self._context.holder, version, held, slots, PARK_S
        )

    def arrived(self) -> Leased | None:
        """Return what was lent, once its rows are here."""
        if self._asking is not None and self._asking.done():
            reply, self._asking = self._asking, None
            if reply.exception() is None:  # else the queue is away: ask its next incarnation
                self._arriving = reply.result(), self._rows.fetch(_rows_in(reply.result()))
        if self._arriving is None or not self._arriving[1].done():
            return None
        leased, self._arriving = self._arriving[0], None
        return leased

    def stop_asking(self) -> None:
        """Take a request back, unless it has been answered."""
        if self._asking is not None and self._asking.cancel():  # the queue gives what came of it to others
            self._asking = None


def _rows_in(leased: Leased) -> list[TensorRef]:
    """Return what has to be here before a lease's samples can begin."""
    records = [record for lease in leased.prompts for record in (lease.group, *lease.chunks)]
    return [ref for record in records for ref in refs_of(record)]
