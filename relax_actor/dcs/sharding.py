"""How one trainer parameter is cut over ranks, and what of a tensor each replica rank wants. Pure.

A trainer's parameter holds one or more of the tensors that Hugging Face knows. Every shard, on either side,
is made of rectangles of those: rows (dimension 0) by bytes of a row. In a trainer's shard a rectangle starts
at some offset and its rows lie some pitch apart.

    replicated    whole on every rank
    column        rows cut in equal parts
    row           dimension 1 cut in equal parts
    vocabulary    rows padded, then cut
    gate and up   of each the rank's rows, one after the other
    qkv           for each of the rank's KV heads: its q heads, k, v

Source:
    Megatron-core's local layer specification; docs/concepts/dcs.md has the table of names.
"""

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from relax_actor.dcs.header import Described
from relax_actor.dcs.topology import ReplicaLayout


class Sharding(StrEnum):
    """How a parameter is cut over the tensor parallel ranks."""

    REPLICATED = "replicated"
    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocabulary"
    GATE_UP = "gate and up"
    QKV = "qkv"


_TENSORS = {Sharding.GATE_UP: 2, Sharding.QKV: 3}


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of the trainer: what is in it and how it is cut.

    Raises:
        ValueError: the number of tensors does not fit the way they are cut.
    """

    parameter: str  # the trainer's name for it, unique over all ranks: layers and experts counted globally
    sharding: Sharding
    tensors: tuple[
        Described, ...
    ]  # under their Hugging Face names, whole; as published, whatever the trainer has
    stage: int = 0  # pipeline stage that holds it
    expert: int | None = None  # which expert it belongs to
    experts: int = 0  # of the layer, all together; only of an expert's
    groups: int = 0  # KV heads; only of `QKV`
    padded_rows: int | None = None  # all ranks together; only of `VOCAB`, None: no padding

    def __post_init__(self) -> None:
        """Check what needs no layout."""
        wanted = _TENSORS.get(self.sharding, 1)
        if len(self.tensors) != wanted:
            raise ValueError(
                f"`{self.parameter}`: {self.sharding} is made of {wanted} tensors, not {self.tensors}"
            )


class Rectangle(NamedTuple):
    """Some rows of a tensor, and of each row some bytes."""

    row: int
    rows: int
    byte: int  # within the row
    nbytes: int  # of each row

    def overlap(self, other: "Rectangle") -> "Rectangle":
        """Return what lies in both, perhaps nothing."""
        row, byte = max(self.row, other.row), max(self.byte, other.byte)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        nbytes = min(self.byte + self.nbytes, other.byte + other.nbytes) - byte
        return Rectangle(row, max(rows, 0), byte, max(nbytes, 0))

    def __str__(self) -> str:
        """Say which rows, and which bytes of each."""
        rows = f"rows {self.row} to {self.row + self.rows - 1}"
        return f"{rows}, bytes {self.byte} to {self.byte + self.nbytes - 1} of each"

    @property
    def area_bytes(self) -> int:
        """Bytes in it."""
        return self.rows * self.nbytes


class Piece(NamedTuple):
    """A rectangle of a tensor where it lies in a trainer's shard."""

    tensor: int  # which of the parameter's
    part: Rectangle
    holders: tuple[int, ...]  # tensor parallel ranks whose shards have it
    offset: int  # bytes from the start of the shard
    pitch: int  # bytes from row to row


class UnmappableError(ValueError):
    """A tensor cannot be cut, or reached, like that; a plan makes a `DCSSyncError` of it."""

    def __init__(self, tensor: Described, reason: str) -> None:
        self.tensor, self.reason = tensor, reason
        super().__init__(f"`{tensor.name}` {list(tensor.shape)}: {reason}")


def pieces(spec: ShardSpec, tp: int) -> list[Piece]:
    """Return where each part of a parameter's tensors lies, over `tp` ranks.

    Raises:
        UnmappableError: it cannot be cut like that.
    """
    match spec.sharding:
        case Sharding.REPLICATED:
            return [_rows_piece(spec, 0, whole(spec.tensors[0]), tuple(range(tp)), 0)]
        case Sharding.ROW:
            return list(_row_pieces(spec, tp))
        case Sharding.QKV:
            return list(_qkv_pieces(spec, tp))
        case Sharding.VOCAB:
            return list(_vocab_pieces(spec, tp))
    return list(_column_pieces(spec, tp))


def wanted(spec: ShardSpec, index: int, replica: ReplicaLayout, rank: int) -> Rectangle:
    """Return what a replica rank wants of the parameter's tensor number `index`.

    Where a replica has more ranks than there are KV heads, several want the same one.

    Raises:
        UnmappableError: it cannot be cut like that.
    """
    tensor = spec.tensors[index]
    match spec.sharding:
        case Sharding.REPLICATED:
            return whole(tensor)
        case Sharding.ROW:
            return _columns(tensor, replica.tp, rank)
        case Sharding.QKV:
            return _heads(spec, index, replica.tp, rank)
        case Sharding.VOCAB:
            padded = _rounded_up(rows_of(tensor), math.lcm(replica.tp, replica.vocab_multiple))
            return _part(whole(tensor), padded // replica.tp, rank)
    return _part(whole(tensor), _equal(tensor, rows_of(tensor), replica.tp, "rows"), rank)


def rows_of(tensor: Described) -> int:
    """Return the length of dimension 0; a scalar is one row."""
    return tensor.shape[0] if tensor.shape else 1


def row_bytes(tensor: Described) -> int:
    """Return the bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.dtype.itemsize


def whole(tensor: Described) -> Rectangle:
    """Return all of a tensor."""
    return Rectangle(0, rows_of(tensor), 0, row_bytes(tensor))


def _column_pieces(spec: ShardSpec, tp: int) -> Iterator[Piece]:
    for rank in range(tp):
        offset = 0
        for index, tensor in enumerate(spec.tensors):
            part = _part(whole(tensor), _equal(tensor, rows_of(tensor), tp, "rows"), rank)
            yield _rows_piece(spec, index, part, (rank,), offset)
            offset += part.area_bytes


def _row_pieces(spec: ShardSpec, tp: int) -> Iterator[Piece]:
    for rank in range(tp):
        part = _columns(spec.tensors[0], tp, rank)
        yield Piece(0, part, (rank,), 0, part.nbytes)


def _vocab_pieces(spec: ShardSpec, tp: int) -> Iterator[Piece]:
    tensor = spec.tensors[0]
    padded = rows_of(tensor) if spec.padded_rows is None else spec.padded_rows
    if padded < rows_of(tensor):
        raise UnmappableError(tensor, f"padded to {padded} rows, which are fewer than it has")
    for rank in range(tp):
        part = _part(whole(tensor), _equal(tensor, padded, tp, "padded rows"), rank)
        yield _rows_piece(spec, 0, part, (rank,), 0)


def _qkv_pieces(spec: ShardSpec, tp: int) -> Iterator[Piece]:
    groups = _equal(spec.tensors[1], spec.groups, tp, "KV heads")
    rows = [_equal(tensor, rows_of(tensor), spec.groups, "rows over KV heads") for tensor in spec.tensors]
    for rank in range(tp):
        offset = 0
        for group in range(rank * groups, (rank + 1) * groups):
            for index, tensor in enumerate(spec.tensors):
                part = _part(whole(tensor), rows[index], group)
                yield _rows_piece(spec, index, part, (rank,), offset)
                offset += part.area_bytes


def _rows_piece(spec: ShardSpec, index: int, part: Rectangle, holders: tuple[int, ...], offset: int) -> Piece:
    return Piece(index, part, holders, offset, row_bytes(spec.tensors[index]))


def _heads(spec: ShardSpec, index: int, tp: int, rank: int) -> Rectangle:
    tensor, keys = spec.tensors[index], spec.tensors[1]
    head_rows = _equal(keys, rows_of(keys), spec.groups, "rows over KV heads")
    heads = rows_of(tensor) // head_rows
    if index and heads < tp and tp % heads == 0:  # keys and values may be wanted twice, queries may not
        return _part(whole(tensor), head_rows, rank * heads // tp)
    return _part(whole(tensor), _equal(tensor, heads, tp, "heads") * head_rows, rank)


def _part(full: Rectangle, rows: int, index: int) -> Rectangle:
    """Return part number `index` of parts of `rows`; beyond the end there is nothing."""
    return full.overlap(full._replace(row=index * rows, rows=rows))


def _columns(tensor: Described, tp: int, rank: int) -> Rectangle:
    if len(tensor.shape) < 2:
        raise UnmappableError(tensor, "it has no dimension 1 to be cut along")
    nbytes = _equal(tensor, tensor.shape[1], tp, "columns") * (row_bytes(tensor) // max(tensor.shape[1], 1))
    return Rectangle(0, rows_of(tensor), rank * nbytes, nbytes)


def _equal(tensor: Described, total: int, parts: int, what: str) -> int:
    if parts < 1 or total % parts:
        raise UnmappableError(tensor, f"{total} {what} cannot be cut into {parts} equal parts")
    return total // parts


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
