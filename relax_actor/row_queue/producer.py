"""Who puts rows, and further fields of rows that are there.

A put is answered when the queue has written it down and has room for the next one; up to `window` of them may
be under way. What waits has two names: `put` in synchronous code, `aput` in asynchronous code.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

from relax_actor.actor import Ref
from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.row_queue.actor import RowQueue
from relax_actor.row_queue.blocks import Layout, SharedValues, Values, by_group
from relax_actor.row_queue.both import Pause, Steps, awaiting, blocking
from relax_actor.row_queue.records import Columns, SharedPut, ranges
from relax_actor.row_queue.ways import Local, Outside, Remote, Site, way_to
from relax_actor.transfer_queue.records import Put
from relax_actor.transfer_queue.storage import PATIENCE_S

if TYPE_CHECKING:
    from relax_actor.supervision.supervisor import Supervisor

PUT_S: Final = 600.0
"""How long a put may wait for room."""

Fields = Mapping[str, Values]
Common = Mapping[str, SharedValues]


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
    """See the module.

    Args:
        site: of the actor that puts: its context. Elsewhere see `of`.
        queue: whom it puts to.
        window: puts that may be under way.
        patience_s: how long a put may wait where memory is full.
    """

    def __init__(
        self, site: Site, queue: Ref[RowQueue], *, window: int = 2, patience_s: float = PATIENCE_S
    ) -> None:
        self._site, self._queue, self._window = site, queue.within(PUT_S), window
        self._patience_s = patience_s
        self._way: Local | Remote | None = None
        self._seq = 0
        self._under_way: deque[Underway] = deque()

    @classmethod
    def of(cls, tree: "Supervisor", queue: str, **options: Any) -> Self:
        """Return a producer for the process that has the supervisor, each somebody else to the queue."""
        return cls(Outside(tree), tree.ref(queue, RowQueue), **options)

    def rows_put(self) -> int:
        """Return how many rows this actor has put, earlier incarnations included: where to go on."""
        return self._queue.ask(RowQueue.rows_put_by, self._site.holder.name).result()

    def put(
        self, fields: Fields, keys: Sequence[int] = (), group_rows: int = 0, shared: Common | None = None
    ) -> range:
        """Put rows and wait until the queue has them; return their numbers. See `put_async`."""
        return blocking(self._put(fields, keys, group_rows, shared))

    async def aput(
        self, fields: Fields, keys: Sequence[int] = (), group_rows: int = 0, shared: Common | None = None
    ) -> range:
        """Do as `put`, in asynchronous code."""
        return await awaiting(self._put(fields, keys, group_rows, shared))

    def put_async(
        self, fields: Fields, keys: Sequence[int] = (), group_rows: int = 0, shared: Common | None = None
    ) -> "Underway":
        """Put rows; wait only where `window` puts are under way, or memory is full.

        Args:
            fields: of as many rows each; see `blocks.Values`. The arrays are copied before this returns.
            keys: the group of each row, where rows have groups.
            group_rows: how many rows each of these groups has.
            shared: by field and group what the rows of groups have in common; see `QueueSpec.shared`.

        Raises:
            PutRefusedError: an earlier put was refused.
            SegmentSpaceError: shared memory is full.
            ParcelTooLargeError: it is too much to be carried to another host.
            NoWayError: the queue is on another host and has no dock.
            ValueError: arrays that do not fit together.
        """
        return blocking(self._begin(fields, keys, group_rows, shared))

    def append(self, rows: Sequence[int], fields: Fields) -> bool:
        """Put further fields of rows, in ascending order; return False where one of them was dropped.

        Raises:
            ValueError: a row has some of these fields and lacks others, or the rows are not in order.
        """
        return blocking(self._append(rows, fields))

    async def aappend(self, rows: Sequence[int], fields: Fields) -> bool:
        """Do as `append`, in asynchronous code."""
        return await awaiting(self._append(rows, fields))

    def flush(self) -> None:
        """Wait until the queue has everything.

        Raises:
            PutRefusedError: something was refused.
        """
        blocking(self._settle(0))

    async def aflush(self) -> None:
        """Do as `flush`, in asynchronous code."""
        await awaiting(self._settle(0))

    def close(self) -> None:
        """Wait until the queue has everything, and give back what memory is kept for further rows."""
        self.flush()
        if self._way is not None:
            self._way.close()
            self._way = None

    def _put(
        self, fields: Fields, keys: Sequence[int], group_rows: int, shared: Common | None
    ) -> Steps[range]:
        put = yield from self._begin(fields, keys, group_rows, shared)
        yield from self._settle(0)
        return put.result()

    def _begin(
        self, fields: Fields, keys: Sequence[int], group_rows: int, shared: Common | None
    ) -> "Steps[Underway]":
        yield from self._settle(self._window - 1)
        keys_of_shared, values = by_group(shared or {})
        if not fields or not values.keys().isdisjoint(fields):
            raise ValueError(f"fields {[*fields]} and shared fields {[*values]}: no field, or one twice")
        columns = yield from self._written({**fields, **values})
        self._seq += 1
        put = Underway(self._delivered(self._seq, columns, [*keys], group_rows, keys_of_shared, [*values]))
        self._under_way.append(put)
        return put

    def _delivered(  # noqa: PLR0917 - what is sent
        self,
        seq: int,
        columns: Columns,
        keys: list[int],
        group_rows: int,
        keys_of_shared: tuple[int, ...],
        shared: Sequence[str],
    ) -> Steps[range]:
        assert self._way is not None  # noqa: S101 - it is written
        columns = yield from self._way.carry(columns, PUT_S)
        common = SharedPut(keys_of_shared, {name: columns.pop(name) for name in shared}) if shared else None
        count = len(next(iter(columns.values())).lengths)
        reply = self._queue.ask(RowQueue.put, self._site.holder, seq, columns, keys, group_rows, common)
        point("rows_sent")
        yield Pause(reply)
        answer = reply.result()
        if answer.outcome is Put.STALE:
            raise PutRefusedError(answer.outcome, count)
        return range(answer.first, answer.first + count)

    def _append(self, rows: Sequence[int], fields: Fields) -> Steps[bool]:
        if any(later <= earlier for earlier, later in pairwise(rows)):
            raise ValueError("rows are to be in ascending order")
        columns = yield from self._written(fields)
        if self._way is not None:
            columns = yield from self._way.carry(columns, PUT_S)
        self._seq += 1
        reply = self._queue.ask(RowQueue.append, self._site.holder, self._seq, ranges(rows), columns)
        yield Pause(reply)
        return reply.result() is not Put.STALE

    def _written(self, fields: Fields) -> Steps[Columns]:
        if self._way is None:
            where = self._queue.ask(RowQueue.where)
            yield Pause(where)
            self._way = way_to(self._site, where.result())
        columns = yield from self._way.write(Layout(fields), self._patience_s)
        point("rows_written")
        return columns

    def _settle(self, left: int) -> Steps[None]:
        """Wait until no more puts than that are under way."""
        for put in self._under_way:
            put.go_on()
        while len(self._under_way) > left:
            yield from self._under_way.popleft().ended()


class Underway:
    """A put that is under way: `.result()` or `await` gives the numbers of its rows.

    Args:
        steps: what is left to do.
    """

    def __init__(self, steps: Steps[range]) -> None:
        self._steps = steps
        self._pause: Pause | None = None
        self._error: Exception | None = None
        self._rows = range(0)
        self._next()

    def done(self) -> bool:
        """Whether there is an answer."""
        self.go_on()
        return self._pause is None

    def result(self) -> range:
        """Wait for the answer.

        Raises:
            PutRefusedError: the rows were not taken.
        """
        return blocking(self.ended())

    def __await__(self) -> Generator[Any, None, range]:
        """Do as `result`, in asynchronous code."""
        return awaiting(self.ended()).__await__()

    def go_on(self) -> None:
        """Go as far as possible without waiting."""
        while self._pause is not None and self._pause.reply is not None and self._pause.reply.done():
            self._next()

    def ended(self) -> Steps[range]:
        """Go to the end."""
        while self._pause is not None:
            yield self._pause
            self._next()
        if self._error is not None:
            raise self._error
        return self._rows

    def _next(self) -> None:
        self._pause = None
        try:
            self._pause = next(self._steps)
        except StopIteration as end:
            self._rows = end.value
        except Exception as error:  # noqa: BLE001 - it is raised to who asks for the result
            self._error = error
