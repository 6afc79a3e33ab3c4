"""Who gets rows, each once, and acknowledges them when their work is done.

It asks for the next rows while it works on what it has. What waits has two names: `get` in synchronous code,
`aget` in asynchronous code.
"""

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

from relax_actor.actor import Ref, Reply
from relax_actor.errors import ActorDied, CallTimeout
from relax_actor.faults import point
from relax_actor.ids import LeaseId
from relax_actor.row_queue.actor import RowQueue
from relax_actor.row_queue.answers import Leased, Wanted
from relax_actor.row_queue.batch import Batch, OpenLease, cuts, refs_of
from relax_actor.row_queue.both import Pause, Steps, awaiting, blocking
from relax_actor.row_queue.records import Dealt
from relax_actor.row_queue.ways import Local, Outside, Remote, Site, way_to
from relax_actor.transfer_queue.records import Put

if TYPE_CHECKING:
    from relax_actor.supervision.supervisor import Supervisor

WAIT_S: Final = 20.0
"""How long a request for rows is parked before it is asked again."""

TRIM_S: Final = 1.0
"""How often it lets go, while it waits, of memory that has no rows any more."""

ACK_S: Final = 600.0
"""How long an acknowledgement may take before it is sent again."""


class RowConsumer:
    """See the module. An actor has one for each consumer group at most.

    Args:
        site: of the actor that gets: its context. Elsewhere see `of`.
        queue: whom it gets them from.
        group: its consumer group.
        max_rows: in a batch.
        lease_rows: asked for at once, and cut into batches; only where the group's sampler is FIFO. Fewer
            requests, but what a dead consumer had not acknowledged is so much more. 0 is `max_rows`.
        rank: which data-parallel rank it is, where the group's sampler deals turns.
        prefetch: ask for the next rows while it works on those it has.
    """

    def __init__(
        self,
        site: Site,
        queue: Ref[RowQueue],
        group: str,
        *,
        max_rows: int = 32,
        lease_rows: int = 0,
        rank: int = 0,
        prefetch: bool = True,
    ) -> None:
        self._site, self._queue, self._group, self._rank = site, queue, group, rank
        self._max_rows, self._lease_rows = max_rows, lease_rows or max_rows
        self._prefetch = prefetch
        self._way: Local | Remote | None = None
        self._batches: deque[Batch] = deque()
        self._held: set[LeaseId] = set()  # and not known to be settled
        self._acks: list[LeaseId] = []  # to be told
        self._told: list[LeaseId] = []  # by the request that is under way
        self._telling: list[tuple[Reply[list[Put]], list[LeaseId]]] = []  # by themselves
        self._asked: Reply[Leased] | None = None
        self.is_finished = False
        """Whether no row will ever come."""
        self.stale_acks = 0
        """Acknowledgements that came too late: others have got, or will get, those rows."""

    @classmethod
    def of(cls, tree: "Supervisor", queue: str, group: str, **options: Any) -> Self:
        """Return a consumer for the process that has the supervisor, each somebody else to the queue."""
        return cls(Outside(tree), tree.ref(queue, RowQueue), group, **options)

    def get(self, wait_s: float | None = None) -> Batch | None:
        """Return the next rows; None where none came within `wait_s`, or where none will ever come.

        Args:
            wait_s: None waits until there are some, or until the stream has ended.

        Raises:
            RemoteError: no such group, or rank.
            NoWayError: the queue is on another host and has no dock.
        """
        return blocking(self._get(wait_s))

    async def aget(self, wait_s: float | None = None) -> Batch | None:
        """Do as `get`, in asynchronous code."""
        return await awaiting(self._get(wait_s))

    def ack(self, batch: Batch) -> None:
        """Say that a batch is done with; the queue hears it by the next `get`, or by `flush`."""
        batch.lease.batches -= 1
        if not batch.lease.batches:
            self._acks.append(batch.lease.lease_id)
            point("rows_done")

    def flush(self) -> list[Put]:
        """Tell the queue now what is done with; return what became of it."""
        return blocking(self._flush())

    async def aflush(self) -> list[Put]:
        """Do as `flush`, in asynchronous code."""
        return await awaiting(self._flush())

    def close(self) -> None:
        """Tell the queue what is done with, and give back the rest, for others to get."""
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None
        self.flush()
        self._batches.clear()
        self._queue.ask(RowQueue.give_back, self._site.holder, self._group).result()
        self._held.clear()
        if self._way is not None:
            self._way.close()
            self._way = None

    def _get(self, wait_s: float | None) -> Steps[Batch | None]:
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while not self._batches:
            leased = yield from self._answer(deadline)
            if leased is None:
                return None
            self.is_finished = leased.is_finished
            if leased.dealt is not None:
                yield from self._take(leased.dealt, was_waited_for=leased.was_parked)
            elif leased.is_finished or (deadline is not None and time.monotonic() >= deadline):
                return None
        point("rows_got")
        return self._batches.popleft()

    def _answer(self, deadline: float | None) -> Steps[Leased | None]:
        """Return the next answer; where the queue died meanwhile, ask its next incarnation."""
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            asked = self._asked = self._asked or self._ask(left)
            if not asked.done():
                self._tell()  # it was sent before these acknowledgements, and may be parked for long
                if self._way is not None:
                    self._way.trim()
                yield Pause(asked, TRIM_S if left is None else min(TRIM_S, left))
            if not asked.done():
                if left is not None and left <= TRIM_S:
                    return None
                continue
            self._asked = None
            try:
                leased = asked.result()
            except (ActorDied, CallTimeout):
                self._acks, self._told = self._told + self._acks, []
                continue
            self._settled(self._told, leased.acked)
            self._told = []
            return leased

    def _ask(self, left_s: float | None) -> Reply[Leased]:
        self._look_at_told()
        self._told, self._acks = self._acks, []
        # A request that nobody will wait for ends by itself.
        wait_s = WAIT_S if self._prefetch or left_s is None else min(WAIT_S, left_s)
        holder, held = self._site.holder, [*self._held]
        wanted = Wanted(self._group, holder, self._lease_rows, self._rank, held, self._told, wait_s)
        return self._queue.within(wait_s + 60.0).ask(RowQueue.lease, wanted)

    def _take(self, dealt: Dealt, *, was_waited_for: bool) -> Steps[None]:
        """Make batches of a lease: one, or as many as hold its rows."""
        self._held.add(dealt.lease_id)
        if self._prefetch:
            self._asked = self._ask(None)
        if self._way is None:
            where = self._queue.ask(RowQueue.where)
            yield Pause(where)
            self._way = way_to(self._site, where.result())
        is_one = self._lease_rows == self._max_rows
        pieces = [dealt.parts] if is_one else [*cuts(dealt.parts, self._max_rows)]
        refs = (
            []
            if isinstance(self._way, Local)
            else [ref for parts in pieces for ref in refs_of(parts, dealt.shared)]
        )
        read = yield from self._way.fetch(refs)
        lease = OpenLease(dealt.lease_id, len(pieces))
        self._batches += [
            Batch(lease, parts, dealt.shared, read, was_waited_for=was_waited_for and not index)
            for index, parts in enumerate(pieces)
        ]

    def _flush(self) -> Steps[list[Put]]:
        self._tell()
        outcomes: list[Put] = []
        while self._telling:
            reply, lease_ids = self._telling[0]
            yield Pause(reply)
            self._telling.pop(0)
            outcomes += reply.result()
            self._settled(lease_ids, reply.result())
        return outcomes

    def _tell(self) -> None:
        if self._acks:
            acks, self._acks = self._acks, []
            reply = self._queue.within(ACK_S).ask(RowQueue.ack, self._site.holder, acks)
            self._telling.append((reply, acks))

    def _look_at_told(self) -> None:
        """Note what was acknowledged by itself, and what has to be told again."""
        telling, self._telling = self._telling, []
        for reply, lease_ids in telling:
            if not reply.done():
                self._telling.append((reply, lease_ids))
            elif reply.exception() is None:
                self._settled(lease_ids, reply.result())
            else:
                self._acks += lease_ids

    def _settled(self, lease_ids: list[LeaseId], outcomes: list[Put]) -> None:
        self._held.difference_update(lease_ids)
        self.stale_acks += outcomes.count(Put.STALE)
