"""A Hugging Face causal language model as a function from tokens and a cache to next-token logits.

The model's own forward is used, so norms, rotary embeddings, biases and logit scaling are right for every
architecture. An own forward with fused projections was measured on SmolLM2's shape (bfloat16, 128 rows,
61 positions, one thread): 157 ms against 157 ms.
"""

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from relax_actor.engines.kv_cache import ALIGN_TOKENS, SlotCache, Window
from relax_actor.engines.route_cache import RouteRecorder, RouteSlots
from relax_actor.moe import file_names, routers
from relax_actor.rl.routing import layout_of


class Network:
    """A model whose weights are copied into it."""

    _loader: "WeightLoader"

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in place; of tied names one is enough.

        Raises:
            KeyError: a name the model does not have, or one that no load has brought so far.
            ValueError: a shape that does not fit.
        """
        self._loader.load(weights)

    def weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Show weights by name; raises `KeyError` for one the model does not have."""
        return self._loader.read(names)

    def sleep(self) -> None:
        """Free the memory of the weights, whose names and shapes stay."""
        self._loader.sleep()

    def wake(self) -> None:
        """Take memory for the weights, all of which the next load has to bring."""
        self._loader.wake()


class Decoder(Network):
    """The policy's network, on one device, never trained here.

    Args:
        model_folder: holds config.json; weights are read only if not `dummy_weights`.
        dtype: `float32`, `bfloat16`, ...
        device: where it computes.
        dummy_weights: start from uninitialised weights, all of which the first `load` has to bring,
            instead of reading those of the folder.
        record_routes: keep the experts that tokens go through in the caches.

    Raises:
        ValueError: the context exceeds what sliding-window layers can see.
        UnsupportedRoutingError: experts are to be recorded of a model without, or of an unknown kind.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        context_tokens: int | None,
        dtype: str,
        device: str,
        dummy_weights: bool,
        record_routes: bool = False,
    ) -> None:
        config = AutoConfig.from_pretrained(model_folder)
        auto = AutoModelForCausalLM
        model = build_model(auto, model_folder, config, getattr(torch, dtype), dummy_weights=dummy_weights)
        self._model = model.to(device).eval().requires_grad_(requires_grad=False)
        self._model.get_output_embeddings().register_forward_pre_hook(self._select_last)
        self._loader = WeightLoader(self._model, dummy_weights=dummy_weights)
        self._last = torch.zeros(0, dtype=torch.int64)
        # Renamed in transformers 5.20; the old name warns there.
        accepted = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        text = config.get_text_config()
        self.device = torch.device(device)
        self.layers: int = text.num_hidden_layers
        self.vocabulary: int = text.vocab_size
        self.context_tokens: int = context_tokens or text.max_position_embeddings
        _check_attention(text, self.context_tokens)
        self._layout = layout_of(text.to_dict()) if record_routes else None
        self._recorder = RouteRecorder(routers(self._model, str(model_folder)) if record_routes else ())

    def new_cache(self, *, rows: int, capacity_tokens: int = ALIGN_TOKENS) -> SlotCache:
        """Make a cache for so many sequences, with their experts if they are recorded."""
        routes = self._route_slots if self._layout else None
        return SlotCache(layers=self.layers, rows=rows, capacity_tokens=capacity_tokens, routes=routes)

    def forward(self, cache: SlotCache, window: Window, tokens: Tensor, last: Tensor) -> Tensor:
        """Write tokens into the window and return the logits that follow each row's last one.

        Args:
            cache: holds all earlier positions of these rows.
            window: rows and positions of `tokens`.
            tokens: int64 [n, q]; what stands after a row's last token is padding.
            last: int64 [n], the index of each row's last token.

        Returns:
            [n, vocabulary], in the model's dtype.
        """
        length = cache.open(window)
        self._last, self._recorder.slots = last, cache.routes
        logits: Tensor = self._model(
            input_ids=tokens,
            position_ids=window.positions,
            attention_mask=window.mask(length, self._model.dtype),
            use_cache=True,
            **{self._cache_name: cache.hf_cache},
        ).logits
        return logits[:, 0]

    def _route_slots(self, rows: int, capacity_tokens: int) -> RouteSlots:
        if self._layout is None:
            raise RuntimeError("experts are not recorded")
        return RouteSlots(self._layout, rows=rows, capacity_tokens=capacity_tokens, device=self.device)

    def _select_last(self, _: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Spare the output layer, the widest of all, every position but each row's last."""
        (hidden,) = args  # [n, q, hidden]
        rows = torch.arange(len(hidden), device=hidden.device)
        return (hidden[rows, self._last][:, None],)


class WeightLoader:
    """Copies weights into a model, and knows which ones no load has brought.

    Args:
        model: a Hugging Face model.
        dummy_weights: its weights are uninitialised; the first `load` has to bring all of them.
    """

    def __init__(self, model: Any, *, dummy_weights: bool) -> None:
        self._model = model
        self._weights: dict[str, Tensor] = {}
        self._shapes: list[tuple[torch.nn.Parameter, torch.Size]] = []  # of what is freed
        self._find_weights(need_all=dummy_weights)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in place; raises as `Decoder.load`."""
        for name, value in weights:
            if name not in self._weights:
                raise KeyError(f"the model has no weight `{name}`")
            own = self._weights[name]
            if own.shape != value.shape:
                raise ValueError(f"`{name}` is {list(value.shape)}, and the model needs {list(own.shape)}")
            own.copy_(value)
            self._unset.pop(own.data_ptr(), None)
        if self._unset:
            missing = ", ".join(f"`{name}`" for name in list(self._unset.values())[:3])
            raise KeyError(f"{len(self._unset)} weights have never been installed, among them {missing}")

    def sleep(self) -> None:
        """Free the weights' memory."""
        self._weights = {}
        self._shapes += [(each, each.shape) for each in self._model.parameters() if each.numel()]
        for parameter, _ in self._shapes:
            parameter.data = parameter.data.new_empty(0)

    def wake(self) -> None:
        """Take memory; what is in it means nothing."""
        for parameter, shape in self._shapes:
            parameter.data = parameter.data.new_empty(shape)
        self._shapes = []
        self._find_weights(need_all=True)

    def _find_weights(self, *, need_all: bool) -> None:
        kind = self._model.config.get_text_config().model_type
        self._weights = dict(file_names(kind, self._model.state_dict().items()))  # tied ones under all names
        parameters = file_names(kind, self._model.named_parameters()) if need_all else ()
        self._unset = {tensor.data_ptr(): name for name, tensor in parameters}  # tied ones once

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Show weights by name, without a copy.

        Raises:
            KeyError: a name the model does not have.
        """
        for name in names:
            if name not in self._weights:
                raise KeyError(f"the model has no weight `{name}`")
            yield name, self._weights[name]


def build_model(
    auto: Any, model_folder: Path, config: Any, dtype: torch.dtype, *, dummy_weights: bool
) -> Any:
    """Build a model by one of transformers' Auto classes, whose methods are untyped."""
    if dummy_weights:
        with no_init_weights():  # most of the time a restarted rollout would take
            model = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.tie_weights()  # a part of what was left out
        return model
    return auto.from_pretrained(model_folder, dtype=dtype, attn_implementation="sdpa")


def _check_attention(config: Any, context_tokens: int) -> None:
    """Refuse what the cache cannot do: forget what leaves a sliding window, or keep a recurrent state."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if window and context_tokens > window and (not kinds or "sliding_attention" in kinds):
        raise ValueError(
            f"the model's sliding window of {window} tokens is shorter than the context of "
            f"{context_tokens} tokens\n\nhint: set the engine's context to at most {window}",
        )
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layers of kind {sorted(other)} are not supported")
