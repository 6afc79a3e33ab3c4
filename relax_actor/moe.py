"""Mixtures of experts in transformers' models: where their routers are, and what their weights are called.

In memory, transformers keeps all experts of a layer in two tensors. Everybody else, model files and SGLang
included, names the matrices of each expert. What is published and installed has those names; the tensors
are views of the fused ones.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from relax_actor.errors import UnsupportedRoutingError

if TYPE_CHECKING:
    from torch import Tensor, nn

ROUTERS = frozenset({"MixtralTopKRouter", "Qwen3MoeTopKRouter"})
"""Modules that return logits, the weights of the chosen experts, and which these are."""

_FUSED_GATE_UP, _FUSED_DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


def routers(model: Any, folder: str) -> "list[nn.Module]":
    """Return a model's routers, in the order of their layers.

    Raises:
        UnsupportedRoutingError: it has none that is known.
    """
    found = [module for module in model.modules() if type(module).__name__ in ROUTERS]
    if not found:
        raise UnsupportedRoutingError(f"the model in {folder}", f"has none of {', '.join(sorted(ROUTERS))}")
    return found


def normalises(router: Any) -> bool:
    """Say whether a router makes the weights of the chosen experts sum to 1."""
    return bool(getattr(router, "norm_topk_prob", True))


def file_names(model_type: str, tensors: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
    """Give each tensor the name it has in model files; fused experts become views, one a matrix.

    Args:
        model_type: of the model's config.json; others than Qwen3-MoE and Mixtral pass unchanged.
        tensors: by transformers' names in memory.
    """
    if model_type == "qwen3_moe":
        return _split(tensors, "mlp", ("gate_proj", "up_proj", "down_proj"))
    if model_type == "mixtral":
        return _split(tensors, "block_sparse_moe", ("w1", "w3", "w2"))
    return iter(tensors)


def _split(
    tensors: "Iterable[tuple[str, Tensor]]", block: str, matrices: tuple[str, str, str]
) -> "Iterator[tuple[str, Tensor]]":
    for name, tensor in tensors:
        if name.endswith(_FUSED_GATE_UP):
            yield from _experts(name.removesuffix(_FUSED_GATE_UP), block, matrices[:2], tensor)
        elif name.endswith(_FUSED_DOWN):
            yield from _experts(name.removesuffix(_FUSED_DOWN), block, matrices[2:], tensor)
        else:
            yield name.replace(".mlp.gate.", f".{block}.gate."), tensor


def _experts(
    layer: str, block: str, matrices: tuple[str, ...], fused: "Tensor"
) -> "Iterator[tuple[str, Tensor]]":
    for expert, both in enumerate(fused):
        for matrix, part in zip(matrices, both.chunk(len(matrices)), strict=True):
            yield f"{layer}.{block}.experts.{expert}.{matrix}.weight", part
