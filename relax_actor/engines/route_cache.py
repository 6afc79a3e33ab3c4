"""The experts that tokens were routed to, kept beside their keys and values: same rows, same positions.

So they follow every copy of a prompt's beginning, and stay as they were recorded when the weights change
between two decode steps. They are written by the device, as part of the forward pass, and read once, when
a sample is handed over.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from relax_actor.rl.routing import RouteLayout, unpack


class RouteSlots:
    """The experts of `rows` sequences.

    Args:
        layout: the model's.
        rows: how many sequences fit.
        capacity_tokens: how long they may be.
        device: the model's.
    """

    def __init__(self, layout: RouteLayout, *, rows: int, capacity_tokens: int, device: torch.device) -> None:
        self._layout = layout
        # Signed where a byte is too small: torch can do little with uint16.
        dtype = torch.uint8 if layout.dtype == np.uint8 else torch.int32
        shape = (rows, capacity_tokens, len(layout.moe_layers), layout.top_k)
        self._experts = torch.zeros(shape, dtype=dtype, device=device)
        self._rows = slice(0, 0)
        self._positions = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def open(self, rows: slice, positions: Tensor) -> None:
        """Let the next forward write these rows at these positions, int64 [n, q]."""
        self._rows, self._positions = rows, positions

    def write(self, place: int, experts: Tensor) -> None:
        """Record what one router chose for the open window.

        Args:
            place: the layer, among those with experts.
            experts: int64 [n * q, top_k].
        """
        index = torch.arange(self._rows.start, self._rows.stop, device=experts.device)[:, None]
        chosen = experts.view(*self._positions.shape, -1).to(self._experts.dtype)
        self._experts[index, self._positions, place] = chosen

    def read(self, row: int, tokens: int) -> npt.NDArray[np.int32]:
        """Return the routes of a row's first tokens: int32 [tokens, layers, top_k]."""
        return unpack(self._experts[row, :tokens].cpu().numpy(), self._layout)

    def copy(self, source: "RouteSlots", source_rows: Tensor, rows: Tensor, length: int) -> None:
        """Copy the first `length` positions of rows of `source` into `rows` here."""
        self._experts[rows, :length] = source._experts[source_rows, :length]  # noqa: SLF001 - one of us

    def grow(self, capacity_tokens: int) -> None:
        """Make room for longer sequences and keep what is there."""
        old = self._experts
        self._experts = old.new_zeros(old.shape[0], capacity_tokens, *old.shape[2:])
        self._experts[:, : old.shape[1]] = old


class RouteRecorder:
    """Writes what a model's routers choose into the slots of the running forward.

    Args:
        routers: in the order of their layers.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self.slots: RouteSlots | None = None
        for place, router in enumerate(routers):
            router.register_forward_hook(partial(self._record, place))

    def _record(self, place: int, _: nn.Module, __: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.slots is not None:
            self.slots.write(place, output[2])
