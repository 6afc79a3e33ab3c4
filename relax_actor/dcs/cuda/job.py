"""What one publication from a GPU is made of: memory in the host, and buckets on the GPU to leave from."""

import contextlib
from collections.abc import Sequence

from torch import Tensor

from relax_actor.dcs.cuda.device import DeviceError, Gpus, Mark, Memory
from relax_actor.dcs.cuda.packing import Named, Plan
from relax_actor.dcs.cuda.snapshot import Buffer
from relax_actor.dcs.shelf import Staging
from relax_actor.ids import PolicyVersion
from transport.shm import Segment

SCRATCH_BUCKETS = 2


class Room:
    """Memory of the host for one version."""

    def __init__(self, staging: Staging, segments: Sequence[Segment], data: Sequence[Tensor]) -> None:
        self.staging, self.segments, self.data = staging, segments, data


class Job:
    """A version on its way; it keeps its weights alive until they are packed."""

    def __init__(
        self,
        version: PolicyVersion,
        step: int,
        *,
        plan: Plan,
        room: Room,
        weights: Named,
    ) -> None:
        self.version, self.step, self.plan, self.room, self.weights = version, step, plan, room, weights
        self.started = self.waited_s = 0.0
        self.buffer: Buffer | None = None
        self.folds: list[Tensor] = []
        self.copied: list[Mark] = []

    def offer(self) -> None:
        """Let others read the packed weights on the GPU, if they stay there."""
        if self.buffer is not None:
            self.buffer.offer(self.version)

    def give_up(self) -> None:
        """Wait for what was queued, then leave nothing."""
        for mark in self.copied:
            with contextlib.suppress(RuntimeError):  # a GPU that is lost
                mark.synchronize()
        if self.buffer is not None:
            self.buffer.release()
        self.room.staging.roll_back()


class Scratch:
    """Two buckets on the GPU, for versions that do not stay there."""

    def __init__(self, gpus: Gpus, device: str, nbytes: int) -> None:
        self._memory: list[Memory] = []
        self.freed: list[Mark | None] = [None] * SCRATCH_BUCKETS
        try:
            for _ in range(SCRATCH_BUCKETS):
                self._memory.append(gpus.allocate(device, nbytes))
        except DeviceError:
            self.close()
            raise

    @property
    def buckets(self) -> list[Tensor]:
        """Both, uint8."""
        return [memory.data for memory in self._memory]

    def close(self) -> None:
        """Free them."""
        while self._memory:
            self._memory.pop().close()
