"""The two ends of a row queue: who puts rows, and who gets them.

Both work inside any actor. A put is answered when the queue has written it down and has room for the next
one; up to `window` of them may be under way. A consumer asks for the next rows while it works on what it has.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.actor import Context, Ref, Reply
from relax_actor.errors import ActorError, RelaxError, RemoteError
from relax_actor.faults import point
from relax_actor.ids import LeaseId
from relax_actor.row_queue import blocks
from relax_actor.row_queue.actor import Leased, PutAnswer, RowQueue, Wanted
from relax_actor.row_queue.blocks import Values
from relax_actor.row_queue.records import Dealt, RowPart, ranges
from relax_actor.transfer_queue.memory import spill_space
from relax_actor.transfer_queue.records import Put
from relax_actor.transfer_queue.storage import RowReader
from transport.pool import SegmentPool
from transport.shm import ShmSpace

PUT_S = 600.0
"""How long a put may wait for room."""

WAIT_S = 20.0
"""How long a request for rows is parked before it is asked again."""


class PutRefusedError(RelaxError):
    """Rows were not taken.

    Args:
        outcome: why.
        rows: how many.
    """

    def __init__(self, outcome: Put, rows: int) -> None:
        self.outcome, self.rows = outcome, rows
        super().__init__(f"{rows} rows were not taken: {outcome}")


class RowProducer:
    """Puts rows, and further fields of rows that are there.

    Args:
        context: of the actor that puts.
        queue: whom it puts to.
        storage_path: the queue's.
        window: puts that may be under way.
    """

    def __init__(
        self,
        context: Context,
        queue: Ref[RowQueue],
        *,
        storage_path: str = "/dev/shm",  # noqa: S108 - shared memory
        window: int = 2,
    ) -> None:
        self._queue, self._holder, self._window = queue.within(PUT_S), context.holder, window
        name, incarnation = context.holder.name, context.holder.incarnation
        self._pool = SegmentPool(ShmSpace(context.run_id, storage_path), name, incarnation)
        self._seq = 0
        self._under_way: deque[Reply[PutAnswer]] = deque()

    def rows_put(self) -> int:
        """Return how many rows this actor has put, earlier incarnations included: where to go on."""
        return self._queue.ask(RowQueue.rows_put_by, self._holder.name).result()

    def put(self, fields: Mapping[str, Values], keys: Sequence[int] = (), group_rows: int = 0) -> range:
        """Put rows and wait until the queue has them; return their numbers. See `put_async`."""
        reply = self.put_async(fields, keys, group_rows)
        self.flush()
        answer, count = reply.result(), _rows(fields)
        return range(answer.first, answer.first + count)

    def put_async(
        self, fields: Mapping[str, Values], keys: Sequence[int] = (), group_rows: int = 0
    ) -> Reply[PutAnswer]:
        """Put rows; wait only where `window` puts are under way.

        Args:
            fields: of as many rows each; see `blocks.Values`. The arrays are copied before this returns.
            keys: the group of each row, where rows have groups.
            group_rows: how many rows each of these groups has.

        Raises:
            PutRefusedError: an earlier put was refused.
            SegmentSpaceError: shared memory is full.
            ValueError: arrays that do not fit together.
        """
        while len(self._under_way) >= self._window:
            self._settle()
        columns = blocks.write(self._pool, fields)
        point("rows_written")
        self._seq += 1
        reply = self._queue.ask(RowQueue.put, self._holder, self._seq, columns, [*keys], group_rows)
        point("rows_sent")
        self._under_way.append(reply)
        return reply

    def append(self, rows: Sequence[int], fields: Mapping[str, Values]) -> bool:
        """Put further fields of rows, in ascending order; return False where one of them was dropped.

        Raises:
            ValueError: a row has such a field already, or the rows are not in order.
        """
        if any(later <= earlier for earlier, later in pairwise(rows)):
            raise ValueError("rows are to be in ascending order")
        columns = blocks.write(self._pool, fields)
        self._seq += 1
        put = self._queue.ask(RowQueue.append, self._holder, self._seq, ranges(rows), columns).result()
        return put is not Put.STALE

    def flush(self) -> None:
        """Wait until the queue has everything.

        Raises:
            PutRefusedError: something was refused.
        """
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        answer = self._under_way.popleft().result()
        if answer.outcome is Put.STALE:
            raise PutRefusedError(answer.outcome, 1)


class Batch:
    """Rows that a consumer has until it acknowledges them.

    Args:
        lease: what they are lent under.
        parts: where they are.
        reader: of this process.
        was_waited_for: whether they were not there yet when they were asked for.
    """

    def __init__(
        self, lease: "OpenLease", parts: Sequence[RowPart], reader: RowReader, *, was_waited_for: bool
    ) -> None:
        self.lease, self.was_waited_for = lease, was_waited_for
        self._parts, self._reader = parts, reader

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the rows: those that the group needs."""
        return tuple(self._parts[0].columns) if self._parts else ()

    def __len__(self) -> int:
        return sum(part.count for part in self._parts)

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows."""
        return [row for part in self._parts for row in range(part.first, part.first + part.count)]

    def lengths(self, name: str) -> list[int]:
        """Return the length of each row's field."""
        return [length for part in self._parts for length in part.columns[name].lengths]

    def packed(self, name: str) -> npt.NDArray[Any]:
        """Return a field of all rows end to end, [sum of lengths, *tail]; in place where it lies so."""
        views = [blocks.view(self._reader, part.columns[name]) for part in self._parts]
        return views[0] if len(views) == 1 else np.concatenate(views)

    def views(self, name: str) -> list[npt.NDArray[Any]]:
        """Return a field of each row, [length, *tail], in place and read-only."""
        found: list[npt.NDArray[Any]] = []
        for part in self._parts:
            values, at = blocks.view(self._reader, part.columns[name]), 0
            for length in part.columns[name].lengths:
                found.append(values[at : at + length])
                at += length
        return found


@dataclass(slots=True)
class OpenLease:
    """A lease, and how many of its batches are not acknowledged."""

    lease_id: LeaseId
    batches: int


class RowConsumer:
    """Gets rows, each once, and acknowledges them when their work is done.

    Args:
        context: of the actor that gets.
        queue: whom it gets them from.
        group: its consumer group.
        max_rows: in a batch.
        lease_rows: asked for at once, and cut into batches; only where the group's sampler is FIFO. Fewer
            requests, but what a dead consumer had not acknowledged is so much more. 0 is `max_rows`.
        rank: which data-parallel rank it is, where the group's sampler deals turns.
        storage_path: the queue's.
        prefetch: ask for the next rows while it works on those it has.
    """

    def __init__(
        self,
        context: Context,
        queue: Ref[RowQueue],
        group: str,
        *,
        max_rows: int = 32,
        lease_rows: int = 0,
        rank: int = 0,
        storage_path: str = "/dev/shm",  # noqa: S108 - shared memory
        prefetch: bool = True,
    ) -> None:
        self._queue, self._group, self._rank = queue, group, rank
        self._max_rows, self._lease_rows = max_rows, lease_rows or max_rows
        self._batches: deque[Batch] = deque()
        self._holder, self._prefetch = context.holder, prefetch
        space = ShmSpace(context.run_id, storage_path)
        self._reader = RowReader(space, spill_space(context.run_id, context.run_dir))
        self._held: set[LeaseId] = set()
        self._acks: list[LeaseId] = []
        self._told: list[LeaseId] = []  # acknowledged by the request that is under way
        self._asked: Reply[Leased] | None = None
        self._wait_s = WAIT_S

    def get(self, wait_s: float | None = None) -> Batch | None:
        """Return the next rows; None where none came within `wait_s`, or where none will ever come.

        Args:
            wait_s: None waits until there are some, or until the stream has ended.
        """
        self._wait_s = WAIT_S if wait_s is None else wait_s
        while not self._batches:
            leased = self._answer()
            self.is_finished = leased.is_finished
            if leased.dealt is not None:
                self._cut(leased.dealt, was_waited_for=leased.was_parked)
                if self._prefetch:
                    self._asked = self._ask()
            elif wait_s is not None or leased.is_finished:
                return None
        point("rows_got")
        return self._batches.popleft()

    is_finished = False
    """Whether no row will ever come."""

    def ack(self, batch: Batch) -> None:
        """Say that a batch is done with; the queue hears it by the next `get`, or by `flush`."""
        batch.lease.batches -= 1
        if not batch.lease.batches:
            self._acks.append(batch.lease.lease_id)
            point("rows_done")

    def flush(self) -> list[Put]:
        """Tell the queue now what is done with; return what became of it."""
        acks = self._taken_acks()
        return self._queue.ask(RowQueue.ack, self._holder, acks).result() if acks else []

    def _cut(self, dealt: Dealt, *, was_waited_for: bool) -> None:
        """Make batches of a lease: one, or as many as hold its rows."""
        self._held.add(dealt.lease_id)
        pieces = (
            [dealt.parts] if self._lease_rows == self._max_rows else [*_cuts(dealt.parts, self._max_rows)]
        )
        lease = OpenLease(dealt.lease_id, len(pieces))
        self._batches += [
            Batch(lease, parts, self._reader, was_waited_for=was_waited_for and not index)
            for index, parts in enumerate(pieces)
        ]

    def _answer(self) -> Leased:
        """Return the next answer; where the queue died meanwhile, ask its next incarnation."""
        while True:
            asked, self._asked = self._asked or self._ask(), None
            if self._acks and not asked.done():  # it was sent before them, and may be parked for long
                self._queue.ask(RowQueue.ack, self._holder, self._taken_acks())
            try:
                return asked.result()
            except RemoteError:  # the request itself is wrong
                raise
            except ActorError:
                self._acks = self._told + self._acks

    def _ask(self) -> Reply[Leased]:
        self._told = self._taken_acks()
        wanted = Wanted(
            self._group,
            self._holder,
            self._lease_rows,
            self._rank,
            [*self._held],
            self._told,
            self._wait_s,
        )
        return self._queue.within(self._wait_s + 60.0).ask(RowQueue.lease, wanted)

    def _taken_acks(self) -> list[LeaseId]:
        acks, self._acks = self._acks, []
        self._held.difference_update(acks)
        return acks


def _cuts(parts: Sequence[RowPart], max_rows: int) -> Iterator[list[RowPart]]:
    """Yield parts of at most `max_rows` rows together."""
    taken: list[RowPart] = []
    room = max_rows
    for part in parts:
        at = 0
        while at < part.count:
            end = min(part.count, at + room)
            columns = {name: column.part(at, end) for name, column in part.columns.items()}
            taken.append(RowPart(part.first + at, end - at, columns))
            room -= end - at
            at = end
            if not room:
                yield taken
                taken, room = [], max_rows
    if taken:
        yield taken


def _rows(fields: Mapping[str, Values]) -> int:
    return len(next(iter(fields.values())))
