"""Moves a trainer's tensors between a GPU and host memory, by the tensors' own objects.

What is moved keeps its identity: modules, optimizer and graph hooks hold the same `Tensor`s, whose data lie
elsewhere. Host memory is page-locked and kept, so that a move is one copy at the bus' speed.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Offload:
    """Where a set of tensors is.

    Args:
        tensors: names all that are to be moved; they come and go, as an optimizer's do.
        device: where they are while they are in use.
        is_offloaded: whether they are in host memory now.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], device: str, *, is_offloaded: bool = False
    ) -> None:
        self._tensors, self._device = tensors, torch.device(device)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by id: what is moved, and its host memory
        self._is_offloaded = is_offloaded

    @torch.no_grad()
    def offload(self) -> None:
        """Move all to host memory, and give the GPU's to other processes. Idempotent."""
        if self._is_offloaded:
            return
        present = {id(tensor): tensor for tensor in self._tensors()}
        self._kept = {key: kept for key, kept in self._kept.items() if key in present}
        for tensor in present.values():
            self._host_memory(tensor).copy_(tensor.data, non_blocking=True)
        self._settle()
        for key, tensor in present.items():
            tensor.data = self._kept[key][1]
        self._is_offloaded = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def onload(self) -> None:
        """Move all to the device. Idempotent."""
        if not self._is_offloaded:
            return
        for tensor in {id(tensor): tensor for tensor in self._tensors()}.values():
            tensor.data = torch.empty_like(tensor.data, device=self._device).copy_(
                tensor.data, non_blocking=True
            )
        self._settle()
        self._is_offloaded = False

    def _host_memory(self, tensor: Tensor) -> Tensor:
        kept = self._kept.get(id(tensor))
        if kept is None or kept[1].shape != tensor.shape:
            host = torch.empty_like(tensor.data, device="cpu", pin_memory=self._device.type == "cuda")
            kept = self._kept[id(tensor)] = tensor, host
        return kept[1]

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
