"""What benchmarks/gpu/dcs.py runs: a trainer with a real load, a store and a replica; see gpu_play.py."""

import statistics
import time

from gpu_play import PlayReplica, PlayStore, PlayTrainer, make_gpus
from qwen3 import SIZES, shapes

from relax_actor import endpoint
from relax_actor.dcs.routes import Route
from transport.shm import ShmSpace

STEP_TOKENS = {"1.7b": 40_960, "4b": 24_576, "tiny": 64}
"""Of a model of each size."""

GB = 1e9


def parameters(name, device):
    """Return bfloat16 weights on a device, random where it is quick."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    weights = [
        (key, torch.empty(shape, dtype=torch.bfloat16, device=device)) for key, shape in shapes(SIZES[name])
    ]
    for _, value in weights:
        value.normal_(0, 0.02, generator=generator)
    return weights


def finish(device):
    import torch

    if str(device) != "cpu":
        torch.cuda.synchronize()


class BenchTrainer(PlayTrainer):
    """Trains: matrix products of forward and backward over real weights, then AdamW on float32 masters."""

    def __init__(self, kind, model, bucket_bytes, buffers=2):
        super().__init__(kind, (), bucket_bytes=bucket_bytes, buffers=buffers)
        import torch

        torch.set_num_threads(1)
        self.model, self.version = model, -1
        self.weights = parameters(model, self.torch_device)
        self.masters = [value.float() for _, value in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-6, fused=True)
        self.tokens = STEP_TOKENS[model]
        sizes = {size for _, value in self.weights if value.dim() == 2 for size in value.shape}
        vocabulary = SIZES[model].vocabulary
        self.rows = {
            size: torch.randn(self._tokens(size), size, device=self.torch_device).bfloat16()
            for size in sizes - {vocabulary}
        }
        self.head_rows = torch.randn(
            self._tokens(vocabulary), vocabulary, device=self.torch_device
        ).bfloat16()

    def _tokens(self, size):
        return max(16, self.tokens // 16) if size == SIZES[self.model].vocabulary else self.tokens

    def _forward_backward(self):
        import torch

        for _, weight in self.weights:
            if weight.dim() < 2:
                continue
            out, inner = weight.shape
            x, dy = self.rows[inner], self.rows.get(out, self.head_rows)
            x = x[: len(dy)]
            torch.mm(x, weight.t())
            torch.mm(dy, weight)
            torch.mm(dy.t(), x)

    def _optimize(self):
        import torch

        self.publisher.before_update()
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_([value for _, value in self.weights], self.masters)

    def one_step(self, *, publishes):
        """Return seconds of a step, and of those, of the call that publishes."""
        started = time.perf_counter()
        self._forward_backward()
        self._optimize()
        self.gpus.finish_current(self.device)  # as a trainer does that reads its gradient's norm
        called = time.perf_counter()
        if publishes:
            self.version += 1
            self.publisher.publish(self.version, self.version, self.weights)
        ended = time.perf_counter()
        return ended - started, ended - called

    @endpoint(timeout_s=600.0)
    def interleaved(self, blocks: int, steps: int) -> dict[str, list[float]]:
        """Run blocks of steps with and without publishing; each block's first step does not count."""
        self.one_step(publishes=True)
        self.publisher.flush()
        result = {"with": [], "without": [], "call": []}
        for block in range(2 * blocks):
            publishes = block % 2 == 0
            for step in range(steps + 1):
                seconds, call = self.one_step(publishes=publishes)
                if step:
                    result["with" if publishes else "without"].append(seconds)
                    if publishes:
                        result["call"].append(call)
            self.publisher.flush()
            finish(self.torch_device)
        return result

    @endpoint(timeout_s=600.0)
    def train(self, seconds: float) -> list[float]:
        """Step and publish for a while; return the seconds of each step."""
        times = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            times.append(self.one_step(publishes=True)[0])
        return times

    @endpoint(timeout_s=600.0)
    def publish_next(self) -> int:
        """Change the weights a little and publish them."""
        for _, value in self.weights[:4]:
            value.mul_(1.0625)
        self.version += 1
        self.publisher.publish(self.version, self.version, self.weights)
        self.publisher.before_update()
        self.publisher.flush()
        return self.version

    @endpoint
    def said(self) -> list[dict[str, float]]:
        """Return what the publisher says of every version."""
        return [
            {
                "seconds": each.seconds,
                "copied_s": each.copied_s,
                "waited_s": each.waited_s,
                "on_gpu": float(each.is_on_gpu),
                "nbytes": float(each.manifest.nbytes),
                "buckets": float(len(each.manifest.buckets)),
            }
            for each in self.published
        ]

    @endpoint(timeout_s=600.0)
    def sums(self) -> list[int]:
        """Return a fold of every weight."""
        return folds(self.weights)


class BenchStore(PlayStore):
    """Stages, and measures what the machine can do."""

    def __init__(self, kind, slot_bytes):
        super().__init__(kind, slot_bytes=slot_bytes)
        self.kind, self.staged = kind, []
        self.stager._on_staged = self.staged.append

    @endpoint
    def said(self) -> list[dict[str, float | str]]:
        """Return what the stager says of every transfer."""
        return [
            {
                "route": str(each.route),
                "nbytes": each.nbytes,
                "seconds": each.seconds,
                "copying_s": each.copying_s,
                "failure": each.failure,
            }
            for each in self.staged
        ]

    @endpoint(timeout_s=300.0)
    def ceilings(self, nbytes: int) -> dict[str, float]:
        """Measure copies GPU 0 to GPU 1, page-locked host to GPU 1, and page-locking and xxh3."""
        import torch

        if self.kind != "cuda":
            return {}
        space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        with space.create("bench", 0, "host", nbytes) as segment:
            result = _rates(make_gpus(self.kind), segment, nbytes)
            space.unlink(segment.name)
        torch.cuda.empty_cache()
        return result


def _rates(gpus, segment, nbytes):
    import torch

    from relax_actor.dcs.cuda.fold import fold
    from relax_actor.dcs.manifest import checksum

    target = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{torch.cuda.device_count() - 1}")
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
    host = torch.frombuffer(segment.buf, dtype=torch.uint8)
    started = time.perf_counter()
    pinned = gpus.pin(host.data_ptr(), nbytes)
    locked = time.perf_counter()
    checksum(segment.buf)
    summed = time.perf_counter()
    rates = {
        "page_lock_s_per_gib": (locked - started) / nbytes * 2**30,
        "xxh3_gb_s": nbytes / GB / (summed - locked),
        "nvlink_gb_s": nbytes / GB / _quickest(lambda: target.copy_(source)),
        "host_to_gpu_gb_s": nbytes / GB / _quickest(lambda: target.copy_(host, non_blocking=True)),
        "gpu_to_host_gb_s": nbytes / GB / _quickest(lambda: host.copy_(target, non_blocking=True)),
        "fold_gb_s": nbytes / GB / _quickest(lambda: fold(target)),
    }
    pinned.close()
    return rates


class BenchReplica(PlayReplica):
    """Installs, by order or whenever there is something newer."""

    def __init__(self, kind, model):
        super().__init__(kind, ())
        from relax_actor.dcs.puller import PolicyPuller

        device = self.sources[Route.PINNED]._gpus.torch_device(self.device)
        self.parameters = {name: value.zero_() for name, value in parameters(model, device)}
        self.pullers = {route: PolicyPuller([source]) for route, source in self.sources.items()}
        self.all = PolicyPuller(list(self.sources.values()))
        self.follows, self.version, self.installs = False, -1, []

    @endpoint(timeout_s=120.0)
    def timed(self, version: int, route: Route) -> float:
        """Install a version by one route; return seconds."""
        started = time.perf_counter()
        self.pullers[route].pull(self._quick_copy, version)
        finish(self._device())
        return time.perf_counter() - started

    @endpoint(timeout_s=120.0)
    def sums(self) -> list[int]:
        """Return a fold of every weight."""
        return folds(self.parameters.items())

    @endpoint
    def follow(self) -> None:
        self.follows = True
        self.ctx.wake()

    @endpoint
    def followed(self) -> list[tuple[int, str, float, float]]:
        """Return version, route or failure, seconds and monotonic time of this incarnation's installs."""
        return self.installs

    def step(self):
        if not self.follows and self.ctx.incarnation == 1:
            return 0.05
        newest = self.sources[Route.PINNED].latest()
        if newest is not None and newest > self.version:
            try:
                pulled = self.all.pull(self._quick_copy, newest)
            except Exception as error:  # noqa: BLE001 - a measurement goes on
                self.installs.append((newest, f"failed: {error}"[:200], 0.0, time.monotonic()))
            else:
                finish(self._device())
                self.version = newest
                self.installs.append((newest, str(pulled.route), pulled.seconds, time.monotonic()))
        return 0.01

    def _quick_copy(self, manifest, tensors):  # noqa: ARG002 - the puller's signature
        for name, value in tensors:
            self.parameters[name].copy_(value)

    def _device(self):
        return next(iter(self.parameters.values())).device


def folds(weights):
    """Return a fold of every weight's bytes."""
    import torch

    from relax_actor.dcs.cuda.fold import fold

    flat = [value.detach().contiguous().reshape(-1).view(torch.uint8) for _, value in sorted(weights)]
    return [int(fold(each.clone() if each.data_ptr() % 8 else each)) for each in flat]


def _quickest(copy, rounds=5):
    """Return the median seconds of a copy, the first one left out."""
    import torch

    times = []
    for _ in range(rounds + 1):
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        started = time.perf_counter()
        copy()
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
