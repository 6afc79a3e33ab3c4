"""Routing replay: a model's routers take the experts that the rollout recorded, with their own weights.

A router computes its probabilities as ever. Those of the recorded experts are normalised as those of its own
choice would be, so gradients flow through the gate; which experts they are, carries none anyway. Without
replay, rounding or a newer policy version sends some tokens to other experts than those that made them, and
their log-probs jump.

Only what is trained is replayed: the reference of a KL term routes by itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relax_actor.config import TrainConfig
from relax_actor.errors import RoutedExpertsError, RoutingMismatchError
from relax_actor.moe import normalises, routers
from relax_actor.rl import routing
from relax_actor.rl.packing import PackedTree
from relax_actor.trainers.base import TrainSequence


@dataclass(frozen=True, kw_only=True)
class PlacedRoutes:
    """The experts of a tree's rows, on the way to where they are used."""

    experts: Tensor  # [rows, MoE layers, top_k], unsigned or signed bytes or more
    arrived: torch.cuda.Event | None = None  # None: it is there, or goes in order with the forward pass


class RouteReplay:
    """Hooks on the routers of one model.

    Args:
        model: from `load_model`.
        folder: where it is from.
        train: how to replay.

    Raises:
        UnsupportedRoutingError: a model without experts, or of an unknown kind.
    """

    def __init__(self, model: Any, folder: Path, train: TrainConfig) -> None:
        self.layout = routing.layout_of(model.config.get_text_config().to_dict())
        self._mode, self._tolerance_frac = train.r3_replay_mode, train.r3_tolerance_frac
        self._device = next(model.parameters()).device
        self._stream = self._own_stream()
        self._experts: Tensor | None = None
        self._own: list[Tensor] = []
        self.places = self.apart = 0  # compared since `take_counts`, and different
        for place, router in enumerate(routers(model, str(folder))):
            router.register_forward_hook(partial(self._reroute, place, normalises(router)))

    def check(self, sequence: TrainSequence) -> None:
        """Refuse a sequence whose routes are not those of its tokens.

        Raises:
            RoutedExpertsError: it has none, or of another length, shape or model.
        """
        routes = sequence.routed_experts
        if routes is None:
            raise RoutedExpertsError(sequence.key, "are missing: its engine has recorded none")
        routing.check_length(routes, len(sequence.prompt), len(sequence.response), sequence.key)
        routing.check_packed(routes, self.layout, sequence.key)

    def place(self, tree: PackedTree, sequences: Sequence[TrainSequence]) -> PlacedRoutes:
        """Lay out the routes of a tree's rows, and with `async` send them ahead to the GPU.

        Args:
            tree: in which tokens share a row only where they share their routes.
            sequences: of its paths.
        """
        table = np.zeros((tree.rows, len(self.layout.moe_layers), self.layout.top_k), _signed(self.layout))
        for path, sequence in zip(tree.paths, sequences, strict=True):
            table[path.numpy()] = sequence.routed_experts
        experts = torch.from_numpy(table)
        return PlacedRoutes(experts=experts) if self._stream is None else self._sent(experts, self._stream)

    @contextmanager
    def replaying(self, placed: PlacedRoutes) -> Iterator[None]:
        """Let the forward pass in this context take the recorded experts."""
        if placed.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(placed.arrived)
            placed.experts.record_stream(torch.cuda.current_stream(self._device))
        self._experts, self._own = placed.experts.to(self._device).long(), []
        try:
            yield
        finally:
            self._experts = None

    def compare(self, tree: PackedTree, sequences: Sequence[TrainSequence], placed: PlacedRoutes) -> None:
        """Count where the trainer's routers would have chosen otherwise; only `check` looks.

        Raises:
            RoutingMismatchError: that is so for too large a share.
        """
        if self._mode != "check":
            return
        own, recorded = torch.stack(self._own, dim=1).cpu().numpy(), placed.experts.cpu().numpy()
        apart = int((np.sort(own, axis=-1) != np.sort(recorded, axis=-1)).any(axis=-1).sum())
        places = own.shape[0] * own.shape[1]
        self.places, self.apart, self._own = self.places + places, self.apart + apart, []
        if apart > self._tolerance_frac * places:
            raise self._error(tree, sequences, recorded, own, apart / places)

    def take_counts(self) -> tuple[int, int]:
        """Return how many places were compared since the last call, and how many differed."""
        counts, self.places, self.apart = (self.places, self.apart), 0, 0
        return counts

    def _own_stream(self) -> torch.cuda.Stream | None:
        """Return a stream for what is sent ahead; None where nothing is."""
        is_ahead = self._mode == "async" and self._device.type == "cuda"
        return torch.cuda.Stream(self._device) if is_ahead else None  # type: ignore[no-untyped-call]

    def _sent(self, experts: Tensor, stream: torch.cuda.Stream) -> PlacedRoutes:
        with torch.cuda.stream(stream):
            sent = experts.pin_memory().to(self._device, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        return PlacedRoutes(experts=sent, arrived=arrived)

    def _reroute(
        self, place: int, is_normalised: bool, _: nn.Module, __: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Replace what a router has chosen; None keeps it."""
        if self._experts is None:
            return None
        logits, own_weights, own = output
        if self._mode == "check":
            self._own.append(own)
        experts = self._experts[:, place]
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
        if is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(own_weights.dtype), experts

    def _error(
        self, tree: PackedTree, sequences: Sequence[TrainSequence], recorded: Any, own: Any, frac: float
    ) -> RoutingMismatchError:
        """Name the first difference, in the order of the sequences."""
        found = (
            (sequence.key, routing.first_mismatch(recorded[path], own[path]))
            for path, sequence in zip(tree.paths, sequences, strict=True)
        )
        sample, first = next((key, difference) for key, difference in found if difference is not None)
        return RoutingMismatchError(
            sample,
            token=first.token,
            layer=self.layout.moe_layers[first.place],
            recorded=first.left,
            own=first.right,
            differing_frac=frac,
            tolerance_frac=self._tolerance_frac,
        )


def steps(sequence: TrainSequence, inputs: Sequence[int]) -> list[tuple[int, bytes]]:
    """Label each input token with its routes: rows of a tree are shared only where both are equal."""
    routes = sequence.routed_experts
    if routes is None:
        raise RoutedExpertsError(sequence.key, "are missing")
    flat = np.ascontiguousarray(routes).reshape(len(routes), -1)
    return [(token, row.tobytes()) for token, row in zip(inputs, flat, strict=True)]


def _signed(layout: routing.RouteLayout) -> type[np.integer[Any]]:
    """Return numbers that torch can index with after one conversion: uint8, or int32 for more experts."""
    return np.uint8 if layout.dtype == np.uint8 else np.int32
