"""Actors for the tests of supervision: they hang, hog the GIL, are spares, and meet in collectives."""

import ctypes
import datetime as dt
import os
import re
import signal
import sys
import time
from pathlib import Path

from relax_actor import Actor, endpoint


class PoisonedError(Exception):
    """What ends a `Worker`."""


class Worker(Actor):
    """Does what a test asks of it."""

    fatal = (PoisonedError,)

    def __init__(self, mark: str = "") -> None:
        self.born_as = self.ctx.name
        self.promoted_as = ""
        if mark:
            Path(mark, str(os.getpid())).touch()

    def on_promoted(self) -> None:
        self.promoted_as = f"{self.ctx.name}#{self.ctx.incarnation}"

    @endpoint(idempotent=True)
    def who(self) -> tuple[int, int, str, str]:
        return os.getpid(), self.ctx.incarnation, self.born_as, self.promoted_as

    @endpoint(max_runtime_s=0.5)
    def limited(self, seconds: float) -> str:
        time.sleep(seconds)
        return "in time"

    @endpoint(max_runtime_s=0.5)
    async def limited_async(self, seconds: float) -> str:
        import asyncio

        await asyncio.sleep(seconds)
        return "in time"

    @endpoint(max_runtime_s=2.5)
    def limited_amply(self, seconds: float) -> str:
        time.sleep(seconds)
        return "in time"

    @endpoint(max_runtime_s=2.5)
    async def limited_amply_async(self, seconds: float) -> str:
        import asyncio

        await asyncio.sleep(seconds)
        return "in time"

    @endpoint(max_runtime_s=0.5)
    def stop_in_it(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    @endpoint
    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    @endpoint(max_runtime_s=0.5)
    def hang_with_the_gil(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")  # no signal wakes it, as one would a sleep

    @endpoint
    def hold_the_gil(self, seconds: int) -> str:
        ctypes.PyDLL(None).sleep(seconds)
        return "done"

    @endpoint
    def spin(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass
        return "done"

    @endpoint
    def work(self, seconds: float, *, report: bool) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if report:
                self.ctx.progress("still at it")
        return "done"

    @endpoint
    def poison(self) -> None:
        raise PoisonedError("it cannot go on")

    @endpoint
    def lose_the_device(self) -> None:
        raise PoisonedError("CUDA error: an illegal memory access was encountered")


class Rank(Actor):
    """A rank of a gloo group."""

    def __init__(self) -> None:
        self.memory = self.ctx.incarnation * 100

    def on_regroup(self, epoch: int) -> None:
        assert epoch == self.ctx.gang.epoch
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if dist.is_initialized():
            dist.destroy_process_group()
        gang = self.ctx.gang
        dist.init_process_group(
            "gloo",
            init_method=gang.rendezvous,
            rank=gang.rank,
            world_size=gang.size,
            timeout=dt.timedelta(seconds=60),
        )

    @endpoint
    def sum_of_ranks(self, *, die: bool = False, after_s: float = 0.0) -> int:
        import torch
        import torch.distributed as dist

        total = torch.tensor([self.ctx.gang.rank + 1])
        dist.all_reduce(total)
        self.ctx.gang.check()
        if die:
            time.sleep(after_s)
            os.kill(os.getpid(), signal.SIGKILL)
        return int(total)

    @endpoint
    def sum_for_ever(self) -> None:
        import torch
        import torch.distributed as dist

        while True:
            dist.all_reduce(torch.ones(1))
            self.ctx.gang.check()

    @endpoint
    def where(self) -> tuple[int, int, int]:
        return os.getpid(), self.ctx.gang.epoch, self.memory

    @endpoint
    def rendezvous(self) -> str:
        return self.ctx.gang.rendezvous


class TorchlessRank(Actor):
    """A rank whose engine meets at a place of its own making."""

    def open_rendezvous(self, epoch: int, host: str) -> str:
        return f"{host} {epoch}"

    @endpoint
    def rendezvous(self) -> str:
        assert "torch" not in sys.modules
        return self.ctx.gang.rendezvous
