"""A trainer, a store and replicas that carry made-up weights over the GPU routes; for tests and benchmarks.

`kind` is `cuda`, or `fake:FOLDER` for GPUs made of files (fake_gpus.py), so that every scene can be rehearsed
on a machine without a GPU.
"""

import hashlib
import time

import msgspec

from relax_actor import Actor, endpoint
from relax_actor.dcs.cuda.staging import StageReply, StageRequest
from relax_actor.dcs.routes import Route
from relax_actor.errors import ActorError
from transport.shm import ShmSpace

SMALL = (
    ("embed.weight", (512, 65)),
    ("layers.0.q.weight", (64, 64)),
    ("layers.0.q.bias", (63,)),
    ("layers.0.scale", ()),
    ("layers.0.nothing", (0, 7)),
    ("layers.0.experts.11.up.weight", (3, 5, 7)),
    ("head.weight", (1031, 3)),
)


def make_gpus(kind, uuids=("GPU-a", "GPU-b")):
    """Return the GPUs of this process."""
    if kind == "cuda":
        from relax_actor.dcs.cuda.ipc import Cuda

        return Cuda()
    from fake_gpus import FakeGpus

    return FakeGpus(kind.partition(":")[2], uuids)


def made_weights(shapes, version, device="cpu", dtype="float32"):
    """Return weights that tell versions apart, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(1000 + version)
    weights = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes]
    counts = ("counts", torch.arange(5) + version)
    return [(name, value.to(getattr(torch, dtype)).to(device)) for name, value in weights] + [
        (counts[0], counts[1].to(device))
    ]


def digest(weights):
    """Return a checksum of named tensors."""
    import torch

    state = hashlib.sha256()
    for name, value in sorted(dict(weights).items()):
        state.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        state.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def expected_digest(shapes, version, dtype="bfloat16"):
    """Return the checksum of a version as it is published."""
    import torch

    cast = getattr(torch, dtype)
    return digest(
        (name, value.to(cast) if value.dtype.is_floating_point else value)
        for name, value in made_weights(shapes, version)
    )


class Result(msgspec.Struct, kw_only=True):
    """What a replica says of an install."""

    route: str = ""
    digest: str = ""
    seconds: float = 0.0
    failures: tuple[tuple[str, str], ...] = ()
    error: str = ""


class PlayTrainer(Actor):
    """Publishes.

    Args:
        kind: see the module.
        shapes: names and shapes of the weights.
        uuids: the GPUs it sees, where they are made of files; its own is the first.
        bucket_bytes: the largest bucket.
        buffers: snapshots on the GPU.
    """

    def __init__(
        self,
        kind: str,
        shapes: tuple[tuple[str, tuple[int, ...]], ...] = SMALL,
        uuids: tuple[str, ...] = ("GPU-a", "GPU-b"),
        bucket_bytes: int = 32 << 10,
        buffers: int = 2,
    ) -> None:
        import torch

        from relax_actor.dcs.cuda.publisher import CudaPublisher

        self.shapes, self.published = shapes, []
        self.gpus = gpus = make_gpus(kind, uuids)
        self.device = gpus.uuids()[0]
        self.torch_device = gpus.torch_device(self.device)
        self.publisher = CudaPublisher(
            ShmSpace(self.ctx.run_id, self.ctx.shm_root),
            gpus,
            self.device,
            dtype=torch.bfloat16,
            bucket_bytes=bucket_bytes,
            buffers=buffers,
            on_published=self.published.append,
        )

    @endpoint(timeout_s=60.0)
    def publish(self, version: int) -> tuple[str, bool]:
        """Publish made weights; return the UUID of the GPU, and whether it offers them."""
        weights = made_weights(self.shapes, version, self.torch_device)
        self.publisher.publish(version, version, weights)
        self.publisher.before_update()
        for _, value in weights:  # what comes after must not reach readers
            value.zero_()
        self.publisher.flush()
        return self.device, self.published[-1].is_on_gpu

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        self.publisher.close()


class PlayStore(Actor):
    """Stages.

    Args:
        kind: see the module.
        uuids: the GPUs it sees, in its own order.
        slot_bytes: the size of a slot.
    """

    def __init__(
        self, kind: str, uuids: tuple[str, ...] = ("GPU-b", "GPU-a"), slot_bytes: int = 32 << 10
    ) -> None:
        from relax_actor.dcs.cuda.stager import Stager

        self.stager = Stager(
            ShmSpace(self.ctx.run_id, self.ctx.shm_root),
            make_gpus(kind, uuids),
            incarnation=self.ctx.incarnation,
            slot_bytes=slot_bytes,
            stall_s=6.0,
        )

    @endpoint(timeout_s=10.0)
    def stage(self, request: StageRequest) -> StageReply:
        return self.stager.open(request)

    @endpoint
    def transfers(self) -> int:
        return self.stager.transfers

    def step(self) -> float:
        self.stager.tick()
        return 0.02

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        self.stager.close()


class PlayReplica(Actor):
    """Installs.

    Args:
        kind: see the module.
        shapes: names and shapes of its parameters.
        uuids: the GPUs it sees, where they are made of files; its own is the first.
        dtype: of its parameters.
    """

    def __init__(
        self,
        kind: str,
        shapes: tuple[tuple[str, tuple[int, ...]], ...] = SMALL,
        uuids: tuple[str, ...] = ("GPU-b",),
        dtype: str = "bfloat16",
    ) -> None:
        from relax_actor.dcs.cuda.source import StagedSource
        from relax_actor.dcs.receiver import PolicyReceiver
        from relax_actor.dcs.source import SharedMemorySource

        space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        gpus = make_gpus(kind, uuids)
        self.device = gpus.uuids()[0]
        self.parameters = dict(made_weights(shapes, 0, gpus.torch_device(self.device), dtype))
        self.addresses = {name: value.data_ptr() for name, value in self.parameters.items()}
        # A real store makes a CUDA context on the replica's GPU first.
        store = self.ctx.ref("store", PlayStore).within(9.0 if kind.startswith("fake") else 10.0)
        self.sources = {
            route: StagedSource(
                route,
                space,
                gpus,
                self.device,
                lambda it: store.ask(PlayStore.stage, it).result(),
                stall_s=9.0,
            )
            for route in (Route.CUDA_IPC, Route.PINNED)
        }
        self.sources[Route.SHARED_MEMORY] = SharedMemorySource(PolicyReceiver(space))

    @endpoint(timeout_s=60.0)
    def install(self, version: int, routes: tuple[Route, ...]) -> Result:
        """Pull a version by the best of `routes` that works."""
        from relax_actor.dcs.puller import NoRouteError, PolicyPuller

        puller = PolicyPuller([self.sources[route] for route in routes])
        try:
            pulled = puller.pull(self._copy, version)
        except NoRouteError as error:
            return Result(
                failures=tuple((each.route, each.reason) for each in error.failures), error=str(error)
            )
        assert {name: value.data_ptr() for name, value in self.parameters.items()} == self.addresses
        return Result(
            route=pulled.route,
            digest=digest(self.parameters.items()),
            seconds=pulled.seconds,
            failures=tuple((each.route, each.reason) for each in pulled.failures),
        )

    @endpoint
    def where(self) -> str:
        return self.device

    def _copy(self, manifest, tensors):  # noqa: ARG002 - the puller's signature
        names = []
        for name, value in tensors:
            assert str(value.device) == str(self.parameters[name].device) or value.device.type == "cpu"
            self.parameters[name].copy_(value)
            names.append(name)
        assert sorted(names) == sorted(self.parameters)


def retried(call, timeout_s=30.0):
    """Repeat a call until the actor is back."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return call().result()
        except ActorError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
