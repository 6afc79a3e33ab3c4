"""Small models as a trainer with several ranks keeps them, and as Hugging Face names them."""

import numpy as np

from relax_actor.dcs.header import Described
from relax_actor.dcs.manifest import Dtype
from relax_actor.dcs.sharding import Sharding, ShardSpec

HEAD = 2  # rows of an attention head
NUMPY = {Dtype.FLOAT32: "f4", Dtype.BFLOAT16: "u2", Dtype.FLOAT8_E4M3FN: "u1", Dtype.INT64: "i8"}


def tensor(name, *shape, dtype=Dtype.FLOAT32):
    return Described(name=name, dtype=dtype, shape=shape)


def spec(sharding, *tensors, **more):
    name = f"mcore.{tensors[0].name}"
    return ShardSpec(parameter=name, sharding=sharding, tensors=tensors, **more)


def decoder(*, heads=4, groups=2, stages=1, experts=0, vocab=11, padded=16, wide=4, dtype=Dtype.FLOAT32):
    """Describe a small decoder as Megatron-core keeps it, under Hugging Face's names."""

    def made(name, *shape):
        return tensor(name, *shape, dtype=dtype)

    yield spec(Sharding.VOCAB, made("embed", vocab, wide), padded_rows=padded)
    for layer in range(2):
        stage, at = layer * stages // 2, f"layers.{layer}."
        qkv = [made(f"{at}{x}", n * HEAD, wide) for x, n in (("q", heads), ("k", groups), ("v", groups))]
        bias = [made(f"{at}{x}.bias", n * HEAD) for x, n in (("q", heads), ("k", groups), ("v", groups))]
        yield spec(Sharding.REPLICATED, made(f"{at}norm", wide), stage=stage)
        yield spec(Sharding.QKV, *qkv, groups=groups, stage=stage)
        yield spec(Sharding.QKV, *bias, groups=groups, stage=stage)
        yield spec(Sharding.ROW, made(f"{at}o", wide, heads * HEAD), stage=stage)
        yield spec(Sharding.COLUMN, made(f"{at}adapter", heads * 2, 3, 2), stage=stage)
        for expert in range(experts) or [None]:
            own = {"stage": stage, "expert": expert, "experts": experts}
            names = [
                f"{at}{'' if expert is None else f'experts.{expert}.'}{x}" for x in ("gate", "up", "down")
            ]
            yield spec(Sharding.GATE_UP, *(made(name, heads * 2, wide) for name in names[:2]), **own)
            yield spec(Sharding.ROW, made(names[2], wide, heads * 2), **own)
    yield spec(Sharding.REPLICATED, made("scale"), stage=stages - 1)
    yield spec(Sharding.VOCAB, made("lm_head", vocab, wide), padded_rows=padded, stage=stages - 1)


def full_model(specs, seed=0):
    generator = np.random.default_rng(seed)
    return {
        each.name: generator.integers(0, 256, (*each.shape, each.dtype.itemsize), np.uint8).view(
            NUMPY[each.dtype]
        )[..., 0]
        for described in specs
        for each in described.tensors
    }


def cut(described, weights, tp, rank):
    """Cut as Megatron-core does; written down a second time, with numpy's means."""
    arrays = [weights[each.name] for each in described.tensors]
    match described.sharding:
        case Sharding.REPLICATED:
            return arrays[0]
        case Sharding.COLUMN:
            return np.split(arrays[0], tp)[rank]
        case Sharding.ROW:
            return np.split(arrays[0], tp, axis=1)[rank]
        case Sharding.GATE_UP:
            return np.concatenate([np.split(array, tp)[rank] for array in arrays])
        case Sharding.VOCAB:
            rows = len(arrays[0]) if described.padded_rows is None else described.padded_rows
            padding = np.full((rows - len(arrays[0]), *arrays[0].shape[1:]), 77, arrays[0].dtype)
            return np.split(np.concatenate([arrays[0], padding]), tp)[rank]
        case Sharding.QKV:
            grouped = [np.split(array, described.groups) for array in arrays]
            fused = [np.concatenate(parts) for parts in zip(*grouped, strict=True)]
            return np.concatenate(fused[rank * len(fused) // tp : (rank + 1) * len(fused) // tp])


def trainer_shards(specs, weights, layout):
    """Return the bytes of every rank's parameters; nobody has what is not of its stage or its experts."""
    shards = {}
    for rank in range(layout.world_size):
        dense, expert = layout.dense(rank), layout.expert(rank)
        for each in specs:
            mine = each.expert is None or each.expert * layout.ep // each.experts == expert["ep"]
            if each.stage == dense["pp"] and mine:
                tp, at = (layout.tp, dense) if each.expert is None else (layout.expert_tp, expert)
                raw = np.ascontiguousarray(cut(each, weights, tp, at["tp"]))
                shards[rank, each.parameter] = raw.reshape(-1).view(np.uint8)
    return shards
