"""How a trainer publishes: from a CPU, at once, or from a GPU, in the background."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from relax_actor.actor import Context
from relax_actor.config import DcsConfig
from relax_actor.dcs.publisher import PolicyPublisher
from relax_actor.devices import CPU
from relax_actor.ids import PolicyVersion
from transport.shm import ShmSpace

if TYPE_CHECKING:
    from torch import Tensor

    from relax_actor.dcs.cuda.publisher import Published


class Publishing(Protocol):
    """What the trainer needs of a publisher."""

    def publish(self, version: PolicyVersion, step: int, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Offer a policy version; the weights must not change before `before_update`."""
        ...

    def before_update(self) -> None:
        """The weights are about to change."""
        ...

    def flush(self) -> None:
        """Wait until all that was published can be read."""
        ...

    def close(self) -> None:
        """Let another publisher follow. Idempotent."""
        ...


def make_publishing(context: Context, space: ShmSpace, config: DcsConfig, device: str) -> Publishing:
    """Make the publisher for weights on `device`, torch's name of it."""
    return HostPublishing(context, space, config) if device == CPU else GpuPublishing(context, space, config)


class HostPublishing:
    """Copies weights of a CPU into shared memory before it returns."""

    def __init__(self, context: Context, space: ShmSpace, config: DcsConfig) -> None:
        self._events = context.events
        self._publisher = PolicyPublisher(
            space, keep=config.keep, bucket_bytes=config.bucket_bytes, budget_bytes=config.budget_bytes
        )
        self.close = self._publisher.close

    def publish(self, version: PolicyVersion, step: int, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Publish; see the protocol."""
        started = time.monotonic()
        manifest = self._publisher.publish(version, step, weights)
        self._events.emit(
            "policy_published",
            version=version,
            step=step,
            seconds=time.monotonic() - started,
            nbytes=manifest.nbytes,
        )

    def before_update(self) -> None:
        """Nothing is under way."""

    def flush(self) -> None:
        """Nothing is under way."""


class GpuPublishing:
    """Starts to copy weights of the current GPU and returns."""

    def __init__(self, context: Context, space: ShmSpace, config: DcsConfig) -> None:
        from relax_actor.dcs.cuda.ipc import Cuda, current_device  # noqa: PLC0415 - only where there are GPUs
        from relax_actor.dcs.cuda.publisher import CudaPublisher  # noqa: PLC0415

        self._events = context.events
        gpus = Cuda()
        publisher = CudaPublisher(
            space,
            gpus,
            current_device(gpus),
            keep=config.keep,
            bucket_bytes=config.bucket_bytes,
            budget_bytes=config.budget_bytes,
            buffers=config.gpu_snapshots,
            on_published=self._say,
        )
        self.publish: Callable[..., None] = publisher.publish
        self.before_update = publisher.before_update
        self.flush = publisher.flush
        self.close = publisher.close

    def _say(self, published: "Published") -> None:
        manifest = published.manifest
        self._events.emit(
            "policy_published",
            version=manifest.version,
            step=manifest.step,
            seconds=published.seconds,
            nbytes=manifest.nbytes,
            copied_s=published.copied_s,
            waited_s=published.waited_s,
            is_on_gpu=published.is_on_gpu,
        )
