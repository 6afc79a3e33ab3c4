"""Which trainer ranks hold what, which replica ranks there are, and who serves whom. Pure.

Ranks are numbered as Megatron-core numbers them: `order` names the dimensions from the one that changes with
every rank to the one that changes last. Expert parameters have a grid of their own over the same ranks: what
the others call `tp x cp x dp` is `etp x ep x dp` for them.

Source:
    https://github.com/NVIDIA/Megatron-LM, `megatron/core/parallel_state.py: RankGenerator`.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from relax_actor.dcs.header import Described
from relax_actor.errors import RelaxError

RankMapping = Mapping[int, int | Sequence[int]] | Sequence[int | Sequence[int]]
"""Trainer rank to the replica ranks it serves; in a sequence, entry n is trainer rank n's."""

Place = tuple[int, int, int | None]
"""Where in the trainer a shard lies: pipeline stage, tensor parallel rank, expert parallel rank or None."""

_DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
_MOST_PRINTED = 16


class TrainerLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a trainer's parameters are spread over its ranks.

    Raises:
        ValueError: the sizes do not fit one another.
    """

    tp: int = 1  # tensor parallel
    pp: int = 1  # pipeline stages
    ep: int = 1  # expert parallel, over the ranks of cp and dp
    dp: int = 1  # data parallel
    cp: int = 1  # context parallel: parameters as in dp
    etp: int | None = None  # tensor parallel of experts; None: as tp
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        """Check that both grids cover the same ranks and have the same pipeline stages."""
        if sorted(self.order.split("-")) != sorted(_DIMENSIONS):
            raise ValueError(f"order `{self.order}` must name {', '.join(_DIMENSIONS)} once each")
        if min(self.tp, self.pp, self.ep, self.dp, self.cp, self.expert_tp) < 1:
            raise ValueError(f"every size must be at least 1: {self}")
        if self.tp * self.cp * self.dp % (self.expert_tp * self.ep):
            raise ValueError(f"etp x ep = {self.expert_tp * self.ep} must divide tp x cp x dp: {self}")
        if any(self.dense(rank)["pp"] != self.expert(rank)["pp"] for rank in range(self.world_size)):
            raise ValueError(f"in order `{self.order}` experts would have other stages than the rest: {self}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    def dense(self, rank: int) -> dict[str, int]:
        """Return a rank's tp, cp, dp and pp coordinates."""
        return self._coordinates(rank, {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp})

    def expert(self, rank: int) -> dict[str, int]:
        """Return a rank's etp (as `tp`), ep, dp and pp coordinates in the grid of the experts."""
        dp = self.tp * self.cp * self.dp // (self.expert_tp * self.ep)
        return self._coordinates(rank, {"tp": self.expert_tp, "ep": self.ep, "dp": dp, "pp": self.pp})

    def _coordinates(self, rank: int, sizes: dict[str, int]) -> dict[str, int]:
        found = {}
        for name in self.order.split("-"):
            if name in sizes:
                rank, found[name] = divmod(rank, sizes[name])
        return found


class ReplicaLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a rollout replica wants its weights.

    With `tp=1` every tensor is wanted whole: what Hugging Face stores.

    Raises:
        ValueError: a size below 1.
    """

    tp: int = 1
    vocab_multiple: int = 64  # the vocabulary is padded to a multiple of this before it is cut

    def __post_init__(self) -> None:
        """Check the sizes."""
        if min(self.tp, self.vocab_multiple) < 1:
            raise ValueError(f"every size must be at least 1: {self}")


class DCSSyncError(RelaxError):
    """No plan leads from the trainer's layout to the replica's; the text shows both.

    Args:
        trainer: how the trainer's parameters lie.
        replica: how the replica wants them.
        serving: for each replica rank, the trainer ranks that may serve it.
        reason: why there is no plan.
        tensor: the first tensor that cannot be mapped; None where it is the mapping of ranks that cannot be.
    """

    def __init__(
        self,
        trainer: TrainerLayout,
        replica: ReplicaLayout,
        serving: Mapping[int, Sequence[int]],
        reason: str,
        *,
        tensor: Described | None = None,
    ) -> None:
        self.trainer, self.replica, self.serving = trainer, replica, serving
        self.reason, self.tensor = reason, tensor
        what = "the rank mapping cannot be used" if tensor is None else _unmapped(tensor)
        lines = [f"{what}: {reason}", *_trainer_lines(trainer), *_replica_lines(replica, serving)]
        hint = "\n\nhint: without a rank mapping every trainer rank serves every replica rank"
        super().__init__("\n".join(lines) + ("" if tensor else hint))


class Holders:
    """The trainer ranks that hold each shard, and of those the ones that serve a given replica rank.

    Args:
        trainer: how the trainer's parameters lie.
        replica: how the replica wants them.
        mapping: who serves whom; None: everybody everybody.

    Raises:
        DCSSyncError: `mapping` misses a replica rank, names a rank that does not exist, or has a replica rank
            served the same shards twice.
    """

    def __init__(
        self, trainer: TrainerLayout, replica: ReplicaLayout, mapping: RankMapping | None = None
    ) -> None:
        self.trainer, self.replica = trainer, replica
        if mapping is None:
            self.serving = {to: list(range(trainer.world_size)) for to in range(replica.tp)}
        else:
            self.serving = _serving(trainer, replica, mapping)
        self._held = {to: _held(trainer, ranks) for to, ranks in self.serving.items()}

    def find(self, place: Place, replica_rank: int) -> int | None:
        """Return the lowest trainer rank that holds a shard and serves a replica rank, None without one."""
        return self._held[replica_rank].get(place)

    def error(self, tensor: Described, reason: str) -> DCSSyncError:
        """Return the error that says why a tensor cannot be mapped."""
        return DCSSyncError(self.trainer, self.replica, self.serving, reason, tensor=tensor)


def _held(trainer: TrainerLayout, ranks: Iterable[int]) -> dict[Place, int]:
    held: dict[Place, int] = {}
    for rank in sorted(ranks):
        for place in _places(trainer, rank):
            held.setdefault(place, rank)
    return held


def _places(trainer: TrainerLayout, rank: int) -> tuple[Place, Place]:
    """Return what a rank holds: its place among the dense shards and that among the experts'."""
    dense, expert = trainer.dense(rank), trainer.expert(rank)
    return (dense["pp"], dense["tp"], None), (expert["pp"], expert["tp"], expert["ep"])


def _serving(trainer: TrainerLayout, replica: ReplicaLayout, mapping: RankMapping) -> dict[int, list[int]]:
    entries = mapping.items() if isinstance(mapping, Mapping) else enumerate(mapping)
    pairs = [(rank, to) for rank, value in entries for to in ([value] if isinstance(value, int) else value)]
    serving = {to: [rank for rank, each in pairs if each == to] for to in range(replica.tp)}
    out_of_range = _out_of_range(trainer, replica, pairs)
    for reason in (*out_of_range, *_missing(serving), *([] if out_of_range else _twice(trainer, serving))):
        raise DCSSyncError(trainer, replica, serving, reason)
    return serving


def _out_of_range(trainer: TrainerLayout, replica: ReplicaLayout, pairs: list[tuple[int, int]]) -> list[str]:
    return [
        f"{who} rank {rank} is out of range: there are {size}"
        for pair in pairs
        for who, rank, size in zip(
            ("trainer", "replica"), pair, (trainer.world_size, replica.tp), strict=True
        )
        if not 0 <= rank < size
    ]


def _missing(serving: dict[int, list[int]]) -> list[str]:
    return [
        f"replica rank {to} is missing: no trainer rank serves it"
        for to, ranks in serving.items()
        if not ranks
    ]


def _twice(trainer: TrainerLayout, serving: dict[int, list[int]]) -> list[str]:
    """Say who is served by two ranks of which one would do: all their shards are the same."""
    return [
        f"replica rank {to} is served the same shards twice, by trainer ranks {one} and {other}"
        for to, ranks in serving.items()
        for one, other in itertools.combinations(ranks, 2)
        if _places(trainer, one) == _places(trainer, other)
    ]


def _unmapped(tensor: Described) -> str:
    return f"`{tensor.name}`, {tensor.dtype} {list(tensor.shape)}, cannot be mapped"


def _trainer_lines(trainer: TrainerLayout) -> list[str]:
    lines = []
    for rank in range(trainer.world_size):
        dense, expert = trainer.dense(rank), trainer.expert(rank)
        place = ", ".join(f"{name} {dense[name]}" for name in ("tp", "pp", "cp", "dp"))
        lines.append(f"rank {rank}: {place}; experts: tp {expert['tp']}, ep {expert['ep']}")
    sizes = ", ".join(f"{name} {getattr(trainer, name)}" for name in _DIMENSIONS)
    return [f"  trainer: {sizes}, etp {trainer.expert_tp}, order {trainer.order}", *_shortened(lines)]


def _replica_lines(replica: ReplicaLayout, serving: Mapping[int, Sequence[int]]) -> list[str]:
    lines = [f"rank {to}: served by trainer ranks {_listed(ranks)}" for to, ranks in serving.items()]
    return [f"  replica: tp {replica.tp}", *_shortened(lines)]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(_cut([str(rank) for rank in ranks])) or "(none)"


def _shortened(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in _cut(lines)]


def _cut(items: list[str]) -> list[str]:
    left = len(items) - _MOST_PRINTED
    return items if left <= 0 else [*items[:_MOST_PRINTED], f"and {left} more"]
