"""Routed experts: which experts of a mixture each token of a sample went through, layer by layer.

An engine gives them as int32 [tokens, layers, top_k]: one row a token that went through the model, which is
all of prompt and response but the last; one place a layer, dense ones too. They are stored packed: layers
with experts only, one byte an expert, or two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.errors import RoutedExpertsError, UnsupportedRoutingError

DENSE = -1
"""What stands for an expert in the layers without any."""

SUPPORTED = frozenset({"mixtral", "qwen3_moe"})
"""Model types whose routers are known: softmax over all experts, the largest top_k of them."""

Routes = npt.NDArray[np.integer[Any]]
SampleKey = tuple[int, int]
"""Group and sample index, for errors."""


@dataclass(frozen=True, kw_only=True)
class RouteLayout:
    """What a model's routes look like."""

    experts: int  # of a layer
    top_k: int  # experts a token goes through
    layers: int  # all, dense ones too
    moe_layers: tuple[int, ...]  # those with experts, ascending

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integers that name every expert."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two routings differ."""

    token: int
    place: int  # of the layer, among those compared
    left: tuple[int, ...]  # ascending
    right: tuple[int, ...]


def layout_of(config: Mapping[str, Any]) -> RouteLayout:
    """Read the layout out of a model's config.json.

    Raises:
        UnsupportedRoutingError: the model has no experts, or routes in a way that is not known here.
    """
    kind = str(config.get("model_type"))
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    layers = config.get("num_hidden_layers") or 0
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    moe_layers = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not experts or not moe_layers:
        raise UnsupportedRoutingError(f"a model of type `{kind}`", "has no experts to route to")
    if kind not in SUPPORTED:
        fact = f"routes in a way that is not known here; known are {', '.join(sorted(SUPPORTED))}"
        raise UnsupportedRoutingError(f"a model of type `{kind}`", fact)
    return RouteLayout(
        experts=experts, top_k=config["num_experts_per_tok"], layers=layers, moe_layers=moe_layers
    )


def routed_tokens(prompt_tokens: int, response_tokens: int) -> int:
    """Return how many tokens have routes: the last one was sampled and never went through the model."""
    return prompt_tokens + response_tokens - 1


def check_length(routes: Routes, prompt_tokens: int, response_tokens: int, sample: SampleKey) -> None:
    """Refuse routes that are not one row a token.

    Raises:
        RoutedExpertsError: they are too few or too many.
    """
    wanted = routed_tokens(prompt_tokens, response_tokens)
    if len(routes) != wanted:
        fact = f"are of {len(routes)} tokens; {prompt_tokens} prompt and {response_tokens} response tokens "
        raise RoutedExpertsError(sample, f"{fact}have {wanted}")


def pack(routes: Routes, layout: RouteLayout, sample: SampleKey) -> Routes:
    """Return routes as they are stored.

    Args:
        routes: [tokens, layers, top_k], as an engine gives them; what stands in dense layers is passed over.
        layout: the model's.
        sample: for errors.

    Returns:
        `layout.dtype` [tokens, MoE layers, top_k].

    Raises:
        RoutedExpertsError: another shape, or an expert the model does not have.
    """
    _check_shape(routes, (layout.layers, layout.top_k), sample)
    kept = routes[:, list(layout.moe_layers)]
    _check_experts(kept, layout, sample)
    return kept.astype(layout.dtype)


def unpack(packed: Routes, layout: RouteLayout) -> npt.NDArray[np.int32]:
    """Return stored routes as engines give them: int32 [tokens, layers, top_k], `DENSE` in dense layers."""
    routes = np.full((len(packed), layout.layers, layout.top_k), DENSE, dtype=np.int32)
    routes[:, list(layout.moe_layers)] = packed
    return routes


def check_packed(packed: Routes, layout: RouteLayout, sample: SampleKey) -> None:
    """Check routes that come from elsewhere, as `pack` would have.

    Raises:
        RoutedExpertsError: another shape, or an expert the model does not have.
    """
    _check_shape(packed, (len(layout.moe_layers), layout.top_k), sample)
    _check_experts(packed, layout, sample)


def splice(
    kept: npt.NDArray[np.int32] | None, whole: npt.NDArray[np.int32], sample: SampleKey
) -> npt.NDArray[np.int32]:
    """Return the routes of a sample that went on: old tokens keep theirs, as they were sampled.

    Args:
        kept: of the tokens before it went on; None where it began here.
        whole: of all tokens; those of the old ones were computed once more, perhaps by newer weights.
        sample: for errors.

    Raises:
        RoutedExpertsError: there are fewer than were kept, or of other layers.
    """
    if kept is None:
        return whole
    if len(kept) > len(whole) or kept.shape[1:] != whole.shape[1:]:
        fact = f"{list(kept.shape)} before it went on, {list(whole.shape)} after"
        raise RoutedExpertsError(sample, f"do not fit one another: {fact}")
    return np.concatenate([kept, whole[len(kept) :]])


def first_mismatch(left: Routes, right: Routes) -> Difference | None:
    """Find where two routings differ, whatever the order of a token's experts.

    Args:
        left: [tokens, layers, top_k].
        right: the same shape.

    Returns:
        The first differing token, and in it the first layer; None where all agree.
    """
    left, right = np.sort(left, axis=-1), np.sort(right, axis=-1)
    token, place = np.nonzero((left != right).any(axis=-1))
    if not len(token):
        return None
    at = int(token[0]), int(place[0])
    return Difference(
        token=at[0], place=at[1], left=tuple(left[at].tolist()), right=tuple(right[at].tolist())
    )


def _check_shape(routes: Routes, wanted: tuple[int, int], sample: SampleKey) -> None:
    if routes.ndim != 3 or routes.shape[1:] != wanted:
        fact = f"have shape {list(routes.shape)}; the model's is [tokens, {wanted[0]} layers, "
        raise RoutedExpertsError(sample, f"{fact}{wanted[1]} experts]")


def _check_experts(routes: Routes, layout: RouteLayout, sample: SampleKey) -> None:
    wrong = np.argwhere((routes < 0) | (routes >= layout.experts))
    if len(wrong):
        token, place, which = wrong[0].tolist()
        layer, expert = layout.moe_layers[place], int(routes[token, place, which])
        fact = f"name expert {expert} at token {token}, layer {layer}; the model has {layout.experts}"
        raise RoutedExpertsError(sample, fact)
