"""Weights as flattened buckets, and as what SGLang's loader takes; nothing of SGLang is imported.

A bucket is one flat uint8 tensor with many weights behind one another, in SGLang's words a
`flattened_bucket`. On a GPU its handle travels, on a CPU its bytes. Every bucket on a GPU is a new tensor of
torch's pool, not one of two that are filled in turn: the server answers when its copies are queued, and it
is torch's count of who uses a shared tensor that says when its memory is free (`collect`); also torch nests
its bookkeeping of a storage once more each time that one is shared. A block of the pool costs nothing.

Source:
    SGLang's `FlattenedTensorBucket` and `SafeUnpickler`, 0.5.17 to 0.5.23; torch's `reduce_tensor`.
"""

import base64
import io
import pickle
from collections.abc import Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE = 6
"""Place of the device's number among the arguments of torch's `rebuild_cuda_tensor`."""


class Weight(NamedTuple):
    """One weight in a bucket."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int  # bytes
    nbytes: int


class Bucket:
    """Some weights behind one another, without gaps.

    Args:
        capacity: in bytes.
        device: as torch names it.
    """

    def __init__(self, capacity: int, device: str) -> None:
        self.weights: list[Weight] = []
        self.nbytes = 0
        self.is_last = False
        self._memory = torch.empty(capacity, dtype=torch.uint8, device=device)

    @property
    def flat(self) -> Tensor:
        """What has been put in, uint8 [nbytes]; what travels by its bytes has no more of them than these."""
        flat = self._memory[: self.nbytes]
        return flat if flat.is_cuda or self.nbytes == self._memory.numel() else flat.clone()

    def fits(self, tensor: Tensor) -> bool:
        """Whether there is room for a weight, at a place where its elements may begin."""
        is_aligned = self.nbytes % tensor.element_size() == 0
        return is_aligned and self.nbytes + tensor.nbytes <= self._memory.numel()

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a weight in, on the current stream."""
        start, nbytes = self.nbytes, tensor.nbytes
        place = self._memory[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=True)
        self.weights.append(Weight(name, tensor.dtype, tensor.shape, start, nbytes))
        self.nbytes += nbytes

    def settle(self) -> None:
        """Wait until everything that was put in is there for other processes."""
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: str) -> Iterator[Bucket]:
    """Fill buckets; the weights keep their order, and the last bucket says that it is.

    Args:
        tensors: each is copied before the next is asked for.
        bucket_bytes: the largest bucket; a larger weight has one to itself.
        device: where the buckets are.

    Raises:
        ValueError: there is no weight at all.
    """
    bucket: Bucket | None = None
    for name, tensor in tensors:
        if bucket is not None and not bucket.fits(tensor):
            yield bucket
            bucket = None
        if bucket is None:
            bucket = Bucket(max(bucket_bytes, tensor.nbytes), device)
        bucket.add(name, tensor.detach())
    if bucket is None:
        raise ValueError("a policy version without weights")
    bucket.is_last = True
    yield bucket


def payloads(bucket: Bucket, ranks: int) -> list[str]:
    """Return what each rank is sent; a handle may be opened once, so each rank has its own."""
    flat = bucket.flat
    if not flat.is_cuda:
        return [_base64(pickle.dumps(_content(bucket, flat)))] * ranks
    return [_base64(_pickled_by_handle(bucket, flat)) for _ in range(ranks)]


def collect(device: str) -> None:
    """Take back the memory of buckets that every rank has let go of."""
    if device != "cpu":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # torch's


class Handle:
    """A tensor on a GPU, pickled as where it is: by its GPU's UUID, as numbers differ between processes.

    Args:
        rebuild: what torch rebuilds it with.
        arguments: for that; torch's device number among them.
        device: UUID of the GPU.
    """

    def __init__(self, rebuild: Any, arguments: tuple[Any, ...], device: str) -> None:
        self._reduced = rebuild, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


def _pickled_by_handle(bucket: Bucket, flat: Tensor) -> bytes:
    rebuild, arguments = reductions.reduce_tensor(flat)  # type: ignore[no-untyped-call]  # torch's
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(_content(bucket, Handle(rebuild, arguments, uuid)))
    return buffer.getvalue()


def _content(bucket: Bucket, flat: Tensor | Handle) -> dict[str, Any]:
    return {"flattened_tensor": flat, "metadata": [_metadata(weight) for weight in bucket.weights]}


def _metadata(weight: Weight) -> SimpleNamespace:
    return SimpleNamespace(
        name=weight.name,
        shape=weight.shape,
        dtype=weight.dtype,
        start_idx=weight.start,
        end_idx=weight.start + weight.nbytes,
        numel=weight.nbytes,
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
