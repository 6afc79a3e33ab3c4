"""Actors that hold GPU and pinned memory, and ranks of an NCCL gang; for tests and benchmarks on GPUs."""

import os
import time

from relax_actor import Actor, endpoint

GIB = 2**30


class Hog(Actor):
    """Holds memory of a GPU and pinned memory of the host.

    Args:
        gpu_gib: on the card.
        pinned_gib: of the host, touched and page-locked, by the first incarnation.
        device: such as `cuda:0`.
    """

    def __init__(self, gpu_gib: int, pinned_gib: int, device: str = "cuda:0") -> None:
        import torch

        self.device = device
        self.on_card = torch.empty(gpu_gib * GIB, dtype=torch.uint8, device=device).fill_(1)
        wanted = pinned_gib if self.ctx.incarnation == 1 else 0  # pinning takes long; once is enough
        self.pinned = [torch.ones(GIB, dtype=torch.uint8).pin_memory() for _ in range(wanted)]
        torch.cuda.synchronize()

    @endpoint(timeout_s=600.0)
    def burn(self, seconds: float) -> None:
        """Keep kernels running."""
        import torch

        a = torch.randn(4096, 4096, device=self.device)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            a = (a @ a).clamp(-1, 1)
            torch.cuda.synchronize()

    @endpoint
    def where(self) -> tuple[int, int]:
        return os.getpid(), self.ctx.incarnation


class NcclRank(Actor):
    """One rank a GPU; sums over NCCL."""

    def __init__(self) -> None:
        import torch

        torch.cuda.set_device(self.ctx.replica)
        self.kept = torch.full((1024,), 100.0 * self.ctx.incarnation, device="cuda")

    def on_regroup(self, epoch: int) -> None:  # noqa: ARG002 - the hook's signature
        import torch
        import torch.distributed as dist

        gang = self.ctx.gang
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "nccl",
            init_method=gang.rendezvous,
            rank=gang.rank,
            world_size=gang.size,
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )

    @endpoint(timeout_s=120.0)
    def sum_of_ranks(self) -> float:
        import torch
        import torch.distributed as dist

        value = torch.full((2**20,), float(self.ctx.gang.rank + 1), device="cuda")
        dist.all_reduce(value)
        torch.cuda.synchronize()
        self.ctx.gang.check()
        return float(value[0])

    @endpoint(timeout_s=120.0)
    def sum_until_aborted(self) -> dict[str, float | str | bool]:
        """All-reduce for ever; tell when and how the abort was met, with what the collective returned."""
        import torch
        import torch.distributed as dist

        from relax_actor.errors import GangAborted

        while True:
            value = torch.full((2**20,), float(self.ctx.gang.rank + 1), device="cuda")
            raised = ""
            try:
                dist.all_reduce(value)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - what the collective itself says is part of the result
                raised = type(error).__name__
            try:
                self.ctx.gang.check()
            except GangAborted:
                self.met = {"at": time.monotonic(), "raised": raised, "wrong": float(value[0]) != 3.0}
                raise

    @endpoint
    def last_abort(self) -> dict[str, float | str | bool]:
        return getattr(self, "met", {})

    @endpoint
    def where(self) -> tuple[int, int, float]:
        return os.getpid(), self.ctx.gang.epoch, float(self.kept.mean())
