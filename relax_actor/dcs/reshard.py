"""Which bytes go where: from a trainer's shards to what its rollouts want. Pure, and worked out once.

A plan says, for every replica rank and tensor, which byte ranges of which trainer ranks' shards make it up.
Each byte of the result is written exactly once. Rows without gaps on either side are one range, and ranges of
equal size at equal distances are one copy, so that a fused, cut and interleaved parameter is few copies.

Shards are taken as published: a trainer that keeps float32 and publishes bfloat16 converts first.
"""

from collections.abc import Iterable, Iterator

import msgspec

from relax_actor.dcs.header import Described
from relax_actor.dcs.manifest import Dtype
from relax_actor.dcs.sharding import Piece, Rectangle, ShardSpec, UnmappableError, pieces, row_bytes, wanted
from relax_actor.dcs.topology import DCSSyncError, Holders, RankMapping, ReplicaLayout, TrainerLayout

__all__ = ["Copy", "DCSSyncError", "ReplicaShard", "ReshardPlan", "plan_reshard"]


class Copy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`rows` runs of `row_bytes` each, at equal distances on either side.

    Without the garbage collector's attention: there are a hundred thousand in a plan, of numbers and a text.
    """

    source: int  # trainer rank
    parameter: str  # of which this is that rank's shard
    source_offset: int  # bytes from the start of the shard
    source_pitch: int  # bytes from run to run
    target_offset: int  # bytes from the start of what the replica rank gets
    target_pitch: int
    row_bytes: int
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes copied."""
        return self.row_bytes * self.rows


class ReplicaShard(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica rank gets of one tensor, and from where."""

    rank: int
    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return sum(copy.nbytes for copy in self.copies)


class ReshardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How every replica rank gets all it wants: tensors in the order of the specification."""

    trainer: TrainerLayout
    replica: ReplicaLayout
    shards: tuple[ReplicaShard, ...]

    def of_rank(self, rank: int) -> tuple[ReplicaShard, ...]:
        """Return what a replica rank gets."""
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def sent_bytes(self) -> dict[int, int]:
        """Return how many bytes each trainer rank gives; those that give none are left out."""
        sent: dict[int, int] = {}
        for copy in (copy for shard in self.shards for copy in shard.copies):
            sent[copy.source] = sent.get(copy.source, 0) + copy.nbytes
        return dict(sorted(sent.items()))


def plan_reshard(
    specs: Iterable[ShardSpec],
    trainer: TrainerLayout,
    replica: ReplicaLayout,
    rank_mapping: RankMapping | None = None,
) -> ReshardPlan:
    """Work out how the trainer's shards become the replica's.

    Of ranks that hold the same, the lowest gives; the other data parallel copies are left alone.

    Args:
        specs: every parameter that is published, once.
        trainer: how they are spread.
        replica: how they are wanted.
        rank_mapping: trainer rank to the replica ranks it serves; who is not named gives nothing. None:
            whoever holds a shard serves everybody.

    Raises:
        DCSSyncError: the mapping is incomplete, or a tensor cannot be mapped: the first one is named.
    """
    holders = Holders(trainer, replica, rank_mapping)
    shards = tuple(shard for spec in specs for shard in _Parameter(spec, holders).shards())
    return ReshardPlan(trainer=trainer, replica=replica, shards=shards)


class _Parameter:
    """The plan of one parameter."""

    def __init__(self, spec: ShardSpec, holders: Holders) -> None:
        self._spec = spec
        self._holders = holders

    def shards(self) -> Iterator[ReplicaShard]:
        try:
            yield from self._shards()
        except UnmappableError as error:
            raise self._holders.error(error.tensor, error.reason) from None

    def _shards(self) -> Iterator[ReplicaShard]:
        trainer, replica = self._holders.trainer, self._holders.replica
        ep = _expert_rank(self._spec, trainer)
        lying = pieces(self._spec, trainer.tp if ep is None else trainer.expert_tp)
        for index, tensor in enumerate(self._spec.tensors):
            found = [piece for piece in lying if piece.tensor == index]
            for rank in range(replica.tp):
                part = wanted(self._spec, index, replica, rank)
                overlaps = [(piece, piece.part.overlap(part)) for piece in found]
                copies = _coalesced(
                    _copy(self._source(piece, common, ep, rank), self._spec.parameter, piece, common, part)
                    for piece, common in overlaps
                    if common.area_bytes
                )
                shape = _shape(tensor, part)
                yield ReplicaShard(
                    rank=rank, name=tensor.name, dtype=tensor.dtype, shape=shape, copies=copies
                )

    def _source(self, piece: Piece, common: Rectangle, ep: int | None, rank: int) -> int:
        places = [(self._spec.stage, tp, ep) for tp in piece.holders]
        found = [source for place in places if (source := self._holders.find(place, rank)) is not None]
        if not found:
            reason = f"no trainer rank that serves replica rank {rank} holds {common}"
            raise UnmappableError(self._spec.tensors[piece.tensor], reason)
        return min(found)


def _expert_rank(spec: ShardSpec, trainer: TrainerLayout) -> int | None:
    """Return which expert parallel rank has a parameter; None if it is no expert's."""
    if spec.stage not in range(trainer.pp):
        raise UnmappableError(
            spec.tensors[0], f"it is of stage {spec.stage}, and the stages are {trainer.pp}"
        )
    if spec.expert is None:
        return None
    if spec.experts % trainer.ep or spec.expert not in range(spec.experts):
        reason = f"expert {spec.expert} of {spec.experts} has no place in {trainer.ep} expert parallel ranks"
        raise UnmappableError(spec.tensors[0], reason)
    return spec.expert // (spec.experts // trainer.ep)


def _copy(source: int, parameter: str, piece: Piece, common: Rectangle, part: Rectangle) -> Copy:
    rows_down, bytes_in = common.row - piece.part.row, common.byte - piece.part.byte
    return Copy(
        source=source,
        parameter=parameter,
        source_offset=piece.offset + rows_down * piece.pitch + bytes_in,
        source_pitch=piece.pitch,
        target_offset=(common.row - part.row) * part.nbytes + common.byte - part.byte,
        target_pitch=part.nbytes,
        row_bytes=common.nbytes,
        rows=common.rows,
    )


def _shape(tensor: Described, part: Rectangle) -> tuple[int, ...]:
    if not tensor.shape:
        return ()
    if part.nbytes == row_bytes(tensor):
        return (part.rows, *tensor.shape[1:])
    return (part.rows, tensor.shape[1] * part.nbytes // row_bytes(tensor), *tensor.shape[2:])


def _coalesced(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    found: list[Copy] = []
    for copy in sorted(map(_straightened, copies), key=lambda copy: copy.target_offset):
        stacked = _stacked(found[-1], copy) if found else None
        found[-1:] = [stacked] if stacked else [*found[-1:], copy]
    return tuple(found)


def _straightened(copy: Copy) -> Copy:
    """Make one run of rows without gaps."""
    if copy.rows > 1 and not copy.row_bytes == copy.source_pitch == copy.target_pitch:
        return copy
    nbytes = copy.nbytes
    return msgspec.structs.replace(copy, rows=1, row_bytes=nbytes, source_pitch=nbytes, target_pitch=nbytes)


def _stacked(first: Copy, second: Copy) -> Copy | None:
    """Add a run to those before it that are as long and as far apart."""
    if second.rows != 1 or first.row_bytes != second.row_bytes or not _same(first, second):
        return None
    pitches = tuple(
        there - (here + (first.rows - 1) * pitch)
        for there, here, pitch in zip(_offsets(second), _offsets(first), _pitches(first), strict=True)
    )
    if min(pitches) < first.row_bytes or (first.rows > 1 and pitches != _pitches(first)):
        return None
    return msgspec.structs.replace(
        first, rows=first.rows + 1, source_pitch=pitches[0], target_pitch=pitches[1]
    )


def _same(first: Copy, second: Copy) -> bool:
    return (first.source, first.parameter) == (second.source, second.parameter)


def _offsets(copy: Copy) -> tuple[int, int]:
    return copy.source_offset, copy.target_offset


def _pitches(copy: Copy) -> tuple[int, int]:
    return copy.source_pitch, copy.target_pitch
