"""Tensors in, bytes out, and back: how weights lie in buckets. numpy arrays are weights as well.

torch is imported only where a torch tensor is written or asked for, so that a process that only watches or
tests policy versions need not pay for it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_actor.dcs.manifest import Dtype, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]

ALIGN_BYTES = 64  # a cache line, and more than any element needs

# What numpy has no type for is shown as unsigned integers of the same size.
_NUMPY: dict[Dtype, "np.dtype[Any]"] = {
    dtype: np.dtype(
        {Dtype.BFLOAT16: "uint16", Dtype.FLOAT8_E4M3FN: "uint8", Dtype.FLOAT8_E5M2: "uint8"}.get(dtype, dtype)
    )
    for dtype in Dtype
}


class Placed(NamedTuple):
    """A tensor and its place in its bucket."""

    name: str
    value: "npt.NDArray[Any] | Tensor"
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int


def fill_buckets(
    weights: "Iterable[tuple[str, npt.NDArray[Any] | Tensor]]", bucket_bytes: int
) -> Iterator[list[Placed]]:
    """Deal tensors, in their order, to buckets of at most `bucket_bytes`; a larger tensor has one to itself.

    No more than one bucket's tensors are held at a time, so `weights` may make them on the way.

    Raises:
        TypeError: an element type that is not in `Dtype`, or not a dense array.
        ValueError: a name that was there before.
    """
    bucket: list[Placed] = []
    seen: set[str] = set()
    for name, value in weights:
        if name in seen:
            raise ValueError(f"two tensors are called `{name}`")
        seen.add(name)
        placed = _placed(name, value, _end_bytes(bucket))
        if bucket and placed.offset + placed.nbytes > bucket_bytes:
            yield bucket
            bucket, placed = [], placed._replace(offset=0)
        bucket.append(placed)
    if bucket:
        yield bucket


def used_bytes(bucket: list[Placed]) -> int:
    """Return where the last tensor of a bucket ends."""
    return bucket[-1].offset + bucket[-1].nbytes


def write(placed: Placed, target: Bytes) -> None:
    """Copy a tensor, contiguous or not, into its place.

    Args:
        placed: the tensor, in any memory torch can copy from.
        target: writable uint8 [placed.nbytes], aligned to the element.
    """
    if placed.nbytes == 0:
        return
    if isinstance(placed.value, np.ndarray):
        np.copyto(target.view(placed.value.dtype).reshape(placed.shape), placed.value)
        return
    import torch  # noqa: PLC0415 - see the module's docstring

    dtype = getattr(torch, placed.dtype)
    torch.from_numpy(target).view(dtype).reshape(placed.shape).copy_(placed.value.detach())


def array_view(entry: TensorEntry, raw: Bytes) -> npt.NDArray[Any]:
    """Show uint8 [entry.nbytes] as the array it is; bfloat16 as uint16, float8 as uint8."""
    return raw.view(_NUMPY[entry.dtype]).reshape(entry.shape)


def tensor_view(entry: TensorEntry, raw: Bytes) -> "Tensor":
    """Show uint8 [entry.nbytes] as the torch tensor it is, without a copy.

    The memory may be read-only, which torch has no notion of: writing to the tensor is then a SIGSEGV.
    """
    import torch  # noqa: PLC0415 - see the module's docstring

    dtype = getattr(torch, entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_Unguarded(raw))).view(dtype).reshape(entry.shape)


class _Unguarded:
    """Bytes without their read-only mark, which would make torch warn at each use; keeps them alive."""

    def __init__(self, raw: Bytes) -> None:
        self._raw = raw
        interface = raw.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def _placed(name: str, value: "npt.NDArray[Any] | Tensor", end_bytes: int) -> Placed:
    dtype = _dtype(name, value)
    shape = tuple(value.shape)
    offset = -(-end_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Placed(name, value, dtype, shape, offset, math.prod(shape) * _NUMPY[dtype].itemsize)


def _dtype(name: str, value: "npt.NDArray[Any] | Tensor") -> Dtype:
    if isinstance(value, np.ndarray):
        known, found = value.dtype.isnative, value.dtype.name
    else:
        known, found = str(value.layout) == "torch.strided", str(value.dtype).removeprefix("torch.")
    if not known or found not in _NUMPY:
        raise TypeError(f"`{name}` cannot be published: element type {found} in this layout")
    return Dtype(found)


def _end_bytes(bucket: list[Placed]) -> int:
    return used_bytes(bucket) if bucket else 0
