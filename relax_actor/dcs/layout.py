"""Tensors in, bytes out, and back: how weights lie in buckets. numpy arrays are weights as well.

torch is imported only where a torch tensor is written or asked for, so that a process that only watches or
tests policy versions need not pay for it.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from relax_actor.dcs.header import RESERVED, Described, entry_bound_bytes, head_and_offsets, head_bound_bytes
from relax_actor.dcs.manifest import Dtype, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]
V = TypeVar("V")

PIECE_BYTES = 256 << 10
"""What is copied before it is summed up: with its copy it fits the second-level cache of one core."""

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
    offset: int  # bytes from the start of the bucket
    nbytes: int


class Bucket(NamedTuple):
    """What one segment will hold: its first bytes, then tensors, in the order they came in."""

    head: bytes
    tensors: list[Placed]
    nbytes: int  # all of it


class PlannedBucket(NamedTuple):
    """What one segment will hold, whatever the values."""

    head: bytes
    tensors: tuple[TensorEntry, ...]  # in the order they came in
    nbytes: int  # all of it


def fill_buckets(
    weights: "Iterable[tuple[str, npt.NDArray[Any] | Tensor]]", bucket_bytes: int
) -> Iterator[Bucket]:
    """Deal tensors, in their order, to buckets of at most `bucket_bytes`; a larger tensor has one to itself.

    No more than one bucket's tensors are held at a time, so `weights` may make them on the way.

    Raises:
        TypeError: an element type that is not in `Dtype`, or not a dense array.
        ValueError: a name that was there before, or that the format keeps for itself.
    """
    for filling in _filled(((_described(name, value), value) for name, value in weights), bucket_bytes):
        head, offsets = head_and_offsets(filling.tensors)
        placed = [
            Placed(tensor.name, value, tensor.dtype, tensor.shape, offset, tensor.nbytes)
            for tensor, value, offset in zip(filling.tensors, filling.values, offsets, strict=True)
        ]
        yield Bucket(head, placed, len(head) + filling.data_bytes)


def plan_buckets(tensors: Iterable[Described], bucket_bytes: int) -> Iterator[PlannedBucket]:
    """Deal tensors to buckets as `fill_buckets` does, before there are any.

    Raises:
        ValueError: a name that was there before, or that the format keeps for itself.
    """
    for index, filling in enumerate(_filled(((tensor, None) for tensor in tensors), bucket_bytes)):
        head, offsets = head_and_offsets(filling.tensors)
        entries = tuple(
            TensorEntry(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                bucket=index,
                offset=offset,
                nbytes=tensor.nbytes,
            )
            for tensor, offset in zip(filling.tensors, offsets, strict=True)
        )
        yield PlannedBucket(head, entries, len(head) + filling.data_bytes)


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


def written(placed: Placed, target: Bytes) -> Iterator[Bytes]:
    """Do as `write` does, and yield the bytes in place, in order, each piece while it is in the cache.

    Whoever sums them up reads them without waiting for memory a second time.
    """
    source = _flat_bytes(placed)
    if source is None:
        write(placed, target)
    for begin in range(0, placed.nbytes, PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        if source is not None:
            np.copyto(piece, source[begin : begin + PIECE_BYTES])
        yield piece


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


def _flat_bytes(placed: Placed) -> Bytes | None:
    """Show a tensor's memory as uint8 [nbytes]; None where it has gaps or is not this process' own."""
    value = placed.value
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None
    if value.device.type != "cpu" or not value.is_contiguous() or value.is_neg():
        return None
    import torch  # noqa: PLC0415 - see the module's docstring

    flat: Bytes = value.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


class _Unguarded:
    """Bytes without their read-only mark, which would make torch warn at each use; keeps them alive."""

    def __init__(self, raw: Bytes) -> None:
        self._raw = raw
        interface = raw.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


class _Filling(Generic[V]):
    """A bucket that still has room, perhaps."""

    def __init__(self, bucket_bytes: int) -> None:
        self.tensors: list[Described] = []
        self.values: list[V] = []
        self.data_bytes = 0
        self._bucket_bytes = bucket_bytes
        self._entries_bytes = 0

    def has_room(self, tensor: Described) -> bool:
        """Whether the tensor may join; the first one always may."""
        head_bytes = head_bound_bytes(self._entries_bytes + self._entry_bytes(tensor))
        return not self.tensors or head_bytes + self.data_bytes + tensor.nbytes <= self._bucket_bytes

    def add(self, tensor: Described, value: V) -> None:
        self.tensors.append(tensor)
        self.values.append(value)
        self._entries_bytes += self._entry_bytes(tensor)
        self.data_bytes += tensor.nbytes

    def _entry_bytes(self, tensor: Described) -> int:
        return entry_bound_bytes(tensor, self._bucket_bytes)


def _filled(pairs: Iterable[tuple[Described, V]], bucket_bytes: int) -> Iterator[_Filling[V]]:
    bucket = _Filling[V](bucket_bytes)
    seen = {RESERVED}
    for tensor, value in pairs:
        if tensor.name in seen:
            raise ValueError(f"`{tensor.name}` cannot be published: the name is taken")
        seen.add(tensor.name)
        if not bucket.has_room(tensor):
            yield bucket
            bucket = _Filling(bucket_bytes)
        bucket.add(tensor, value)
    if bucket.tensors:
        yield bucket


def _described(name: str, value: "npt.NDArray[Any] | Tensor") -> Described:
    return Described(name=name, dtype=_dtype(name, value), shape=tuple(value.shape))


def _dtype(name: str, value: "npt.NDArray[Any] | Tensor") -> Dtype:
    if isinstance(value, np.ndarray):
        known, found = value.dtype.isnative, value.dtype.name
    else:
        known, found = str(value.layout) == "torch.strided", str(value.dtype).removeprefix("torch.")
    if not known or found not in _NUMPY:
        raise TypeError(f"`{name}` cannot be published: element type {found} in this layout")
    return Dtype(found)
