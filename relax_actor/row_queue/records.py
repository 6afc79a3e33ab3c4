"""What producers, queue and consumers say to one another, and what the queue writes down."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from relax_actor.ids import Holder, LeaseId
from relax_actor.protocol import TensorRef

Ranges = list[tuple[int, int]]
"""Rows by number, as ascending half-open ranges."""


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One field of some rows: their values end to end."""

    segment: str
    offset: int  # of the first value, bytes into the segment
    dtype: str  # numpy name
    tail: tuple[int, ...]  # shape of one value but for its length
    lengths: tuple[int, ...]  # of each row's value; its shape is [length, *tail]

    @property
    def step_bytes(self) -> int:
        """Bytes of a value of length 1."""
        nbytes = itemsize(self.dtype)
        for width in self.tail:
            nbytes *= width
        return nbytes

    def part(self, low: int, high: int) -> "Column":
        """Return the same of fewer rows."""
        if low == 0 and high == len(self.lengths):
            return self
        offset = self.offset + sum(self.lengths[:low]) * self.step_bytes
        return Column(self.segment, offset, self.dtype, self.tail, self.lengths[low:high])

    def ref(self) -> TensorRef:
        """Return where all of it lies."""
        return TensorRef(self.segment, self.offset, self.dtype, (sum(self.lengths), *self.tail))


Columns = dict[str, Column]


class RowPart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows, and where their own fields are."""

    first: int
    count: int
    columns: Columns
    keys: tuple[int, ...] = ()  # the group of each row; empty where there are none

    def cut(self, low: int, high: int) -> "RowPart":
        """Return some of the rows, counted from the first."""
        columns = {name: column.part(low, high) for name, column in self.columns.items()}
        return RowPart(self.first + low, high - low, columns, self.keys[low:high])


class Dealt(msgspec.Struct, frozen=True, kw_only=True):
    """Queue to consumer: these rows are yours until the lease ends."""

    lease_id: LeaseId
    parts: tuple[RowPart, ...]
    until_s: float  # on the queue's clock; for logs
    shared: dict[int, Columns] = {}  # by group, what its rows have in common: columns of one value


# -- what is written down -----------------------------------------------------------------------


class RowsPut(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """A producer has put rows, which have numbers from `first` on."""

    producer: Holder
    seq: int
    first: int
    count: int
    columns: Columns
    keys: tuple[int, ...] = ()  # the group of each row; empty where there are none
    group_rows: int = 0  # how many rows each of these groups has


class SharedPut(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """A producer is about to put rows of these groups, which have fields in common."""

    keys: tuple[int, ...]
    columns: Columns  # a value for each group
    gone: tuple[int, ...] = ()  # in a snapshot: how many rows of each group were here once


class FieldsPut(msgspec.Struct, frozen=True, array_like=True, tag="fields"):
    """A producer has put further fields of rows."""

    producer: Holder
    seq: int
    rows: Ranges
    columns: Columns


class RowsLeased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """A consumer has rows until a moment of the queue's clock."""

    lease_id: LeaseId
    group: str
    holder: Holder
    rows: Ranges
    until_s: float
    rank: int = 0


class TurnDealt(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """The next turn of a group of ranks: the rows of each."""

    group: str
    shares: list[Ranges | None]  # None in a snapshot: the rank has had its share


class RowsAcked(msgspec.Struct, frozen=True, array_like=True, tag="acked"):
    """A consumer is done with its rows."""

    lease_ids: list[LeaseId]


class LeaseOver(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """Leases ended without that; their rows are dealt again."""

    lease_ids: list[LeaseId]
    is_failure: bool  # counts as an attempt


class RowsDropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """Rows will not be dealt any more: to one group, or to any where `group` is empty."""

    rows: Ranges
    reason: str
    group: str = ""


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag="fenced"):
    """Incarnations of a name below this one are dead; nothing is taken from them."""

    name: str
    incarnation: int


class StreamEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """No further rows will be put."""


class RowsGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """In a snapshot: rows that were put once and are not here any more, up to a number."""

    below: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """In a snapshot: what a group is done with."""

    group: str
    rows: Ranges  # of those that are here
    acked: int  # of all that were ever put
    dropped: int
    failures: dict[int, int]  # by row
    wanted: dict[int, int] = {}  # by key: the rows of groups that have lost some


class SeqSeen(msgspec.Struct, frozen=True, array_like=True, tag="seq"):
    """In a snapshot: the newest put of a producer, and the first number of its rows."""

    producer: Holder
    seq: int
    first: int


class PutBy(msgspec.Struct, frozen=True, array_like=True, tag="by"):
    """In a snapshot: how many rows all incarnations of a name have put."""

    name: str
    rows: int


Event = (
    RowsPut
    | FieldsPut
    | SharedPut
    | RowsLeased
    | TurnDealt
    | RowsAcked
    | LeaseOver
    | RowsDropped
    | Fenced
    | StreamEnded
    | RowsGone
    | Settled
    | SeqSeen
    | PutBy
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Event])


def encode_events(events: Sequence[Event]) -> bytes:
    """Return events as MessagePack."""
    return _encoder.encode(events)


def decode_events(data: bytes) -> list[Event]:
    """Return events out of MessagePack.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _decoder.decode(data)


def ranges(rows: Iterable[int]) -> Ranges:
    """Return ascending rows as ranges."""
    found: Ranges = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found


def each(rows: Ranges) -> Iterator[int]:
    """Yield the rows of ranges."""
    for low, high in rows:
        yield from range(low, high)


def count(rows: Ranges) -> int:
    """Return how many rows there are."""
    return sum(high - low for low, high in rows)


_SIZES: dict[str, int] = {}


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of a numpy dtype."""
    size = _SIZES.get(dtype)
    if size is None:
        import numpy as np  # noqa: PLC0415 - the queue's process asks seldom

        size = _SIZES[dtype] = np.dtype(dtype).itemsize
    return size
