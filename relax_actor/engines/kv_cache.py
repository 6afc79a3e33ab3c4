"""Keys and values of many sequences, each in a row of its own, written in place.

A layer is one tensor [rows, kv heads, capacity, head_dim]: nothing is concatenated as sequences grow, and a
forward over consecutive rows attends over a view. Memory is for the longest sequence times the rows;
capacity doubles when it must. Hugging Face models write through `SlotCache.hf_cache`, whatever their
architecture, as long as all their layers attend to the whole past.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from relax_actor.engines.route_cache import RouteSlots

ALIGN_TOKENS = 64  # rows then start at multiples of a cache line, whatever the head size


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one forward writes and sees: consecutive rows, each at positions of its own."""

    first_row: int
    positions: Tensor  # int64 [n, q]; row i is written at positions[i] and sees all up to them

    @property
    def rows(self) -> slice:
        """The rows it covers."""
        return slice(self.first_row, self.first_row + len(self.positions))

    def mask(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return the additive attention mask, [n, 1, q, length]: 0 up to the own position, -inf after."""
        seen = torch.arange(length, device=self.positions.device) <= self.positions[:, None, :, None]
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


class SlotCache:
    """The keys and values of `rows` sequences in all layers.

    Args:
        layers: how many layers the model has.
        rows: how many sequences fit.
        capacity_tokens: how long they may be before memory grows; rounded up.
        routes: makes room for the experts of as many rows and positions; None keeps none.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        capacity_tokens: int = ALIGN_TOKENS,
        routes: Callable[[int, int], RouteSlots] | None = None,
    ) -> None:
        capacity = _aligned(capacity_tokens)
        self.layers = [_SlotLayer(rows, capacity) for _ in range(layers)]
        self.hf_cache = Cache(layers=[*self.layers])
        self.routes = None if routes is None else routes(rows, capacity)

    @property
    def capacity_tokens(self) -> int:
        """How long a sequence may be before memory grows."""
        return self.layers[0].capacity

    def open(self, window: Window) -> int:
        """Let the next forward write and see `window`; return the length it attends over, in tokens."""
        length = int(window.positions.max()) + 1
        self._reserve(length)
        for layer in self.layers:
            layer.window, layer.length = window, length
        if self.routes is not None:
            self.routes.open(window.rows, window.positions)
        return length

    def copy(self, source: "SlotCache", source_rows: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows of `source`, or of this cache, into `rows` here."""
        if not rows or not length:
            return
        self._reserve(length)
        origin, here = torch.tensor(source_rows), torch.tensor(rows)
        for own, other in zip(self.layers, source.layers, strict=True):
            own.copy(other, origin, here, length)
        if self.routes is not None and source.routes is not None:
            self.routes.copy(source.routes, origin, here, length)

    def drop(self) -> None:
        """Free what is kept of sequences; memory is taken again when there are some."""
        for layer in self.layers:
            layer.drop()

    def _reserve(self, length: int) -> None:
        if length > self.capacity_tokens:
            capacity = _aligned(max(length, 2 * self.capacity_tokens))
            for layer in self.layers:  # one at a time, so that only one layer exists twice at once
                layer.grow(capacity)
            if self.routes is not None:
                self.routes.grow(capacity)


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # transformers types only half
    """One layer, as Hugging Face's attention modules see it."""

    keys: Tensor  # [rows, heads, capacity, head_dim], once initialized
    values: Tensor

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.rows, self.capacity, self.length = rows, capacity, 0
        self.window = Window(first_row=0, positions=torch.zeros(0, 0, dtype=torch.int64))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate once the model shows its head count, head sizes, dtype and device.

        Zeros, because a masked position still takes part: 0 times a NaN found in memory is NaN.
        """
        self.keys, self.values = (
            states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002 - transformers passes what other caches need
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Write [n, heads, q, head_dim] into the window; return views [n, heads, length, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.window.rows
        index = torch.arange(rows.start, rows.stop, device=key_states.device)[:, None]
        self.keys[index, :, self.window.positions] = key_states.transpose(1, 2)
        self.values[index, :, self.window.positions] = value_states.transpose(1, 2)
        return self.keys[rows, :, : self.length], self.values[rows, :, : self.length]

    def copy(self, other: "_SlotLayer", source_rows: Tensor, rows: Tensor, length: int) -> None:
        """Copy positions from rows of a layer of the same model."""
        if not self.is_initialized:
            self.lazy_initialization(other.keys, other.values)
        self.keys[rows, :, :length] = other.keys[source_rows, :, :length]
        self.values[rows, :, :length] = other.values[source_rows, :, :length]

    def grow(self, capacity: int) -> None:
        """Make room for longer sequences and keep what is there."""
        old, self.capacity = self.capacity, capacity
        if self.is_initialized:
            keys, values = self.keys, self.values
            self.lazy_initialization(keys, values)
            self.keys[:, :, :old], self.values[:, :, :old] = keys, values

    def drop(self) -> None:
        """Free keys and values."""
        if self.is_initialized:
            del self.keys, self.values
            self.is_initialized = False

    def get_seq_length(self) -> int:
        """Return the length attended over, in tokens."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - transformers' signature
        """Return the attended length and its offset."""
        return self.length, 0

    def get_max_length(self) -> int:
        """Return -1: the layer grows."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


def _aligned(tokens: int) -> int:
    """Round up to whole alignments."""
    return -(-tokens // ALIGN_TOKENS) * ALIGN_TOKENS
