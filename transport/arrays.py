"""Arrays beside a message: a small descriptor in it, and one frame which is the array's own memory.

A descriptor is a MessagePack extension: its code says whether a NumPy array or a torch tensor is wanted, and
its data is `[frame, dtype, shape]`. Reading makes views: no byte is copied, except where the frame lies at an
address that the dtype must not lie at, or where torch would need to write what is read-only.

NumPy and torch are imported only to read an array of theirs, so that processes without arrays start sooner
and stay small. Writing looks them up in `sys.modules`: who passes an array has imported them.
"""

import importlib
import math
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec

from transport.control import Frame
from transport.errors import CodecError


class ArrayKind(IntEnum):
    """The extension code of a descriptor."""

    NUMPY = 1
    TORCH = 2


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Where an array is: C-contiguous, from the start of its frame to the end."""

    frame: int  # from 0, arrays only
    dtype: str  # numpy: array-interface string, such as <f4; torch: name, such as bfloat16
    shape: tuple[int, ...]

    @property
    def items(self) -> int:
        """How many items the shape has."""
        return math.prod(self.shape)


NUMPY_KINDS: Final = "biufc"
"""Kinds of dtype whose items are plain numbers: no object, no text, no record, no date."""

TORCH_ITEM_BYTES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Every torch dtype that travels, and the size of its items in bytes."""

_MAX_DIMENSIONS: Final = 32
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Descriptor)


class ArrayWriter:
    """Collects the frames of the arrays in one message."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def write(self, item: Any) -> tuple[int, bytes] | None:
        """Describe an array and keep its memory as a frame.

        Returns:
            The extension's code and data, or None if `item` is no array.

        Raises:
            TypeError: an array that cannot travel: on a device, sparse, or of no plain numbers.
        """
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(item, numpy.ndarray):
            return self._add(ArrayKind.NUMPY, *_numpy_bytes(item, numpy), item.shape)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(item, torch.Tensor):
            return self._add(ArrayKind.TORCH, *_torch_bytes(item, torch), tuple(item.shape))
        return None

    def _add(
        self, kind: ArrayKind, dtype: str, data: memoryview, shape: tuple[int, ...]
    ) -> tuple[int, bytes]:
        self.frames.append(data)
        descriptor = Descriptor(frame=len(self.frames) - 1, dtype=dtype, shape=shape)
        return int(kind), _encoder.encode(descriptor)


class ArrayReader:
    """Turns descriptors into views of the frames of one message; each frame belongs to one array."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        self._next = 0

    @property
    def unread_frames(self) -> int:
        """How many frames no array has asked for."""
        return len(self._frames) - self._next

    def rewind(self) -> None:
        """Begin again, for another attempt to read the same message."""
        self._next = 0

    def read(self, code: int, data: Frame) -> Any:
        """Return the array that an extension describes.

        Raises:
            CodecError: the extension is unknown, or does not describe the next frame.
        """
        try:
            kind, descriptor = ArrayKind(code), _decoder.decode(data)
            view = self._frame_of(descriptor)
            return _numpy_view(descriptor, view) if kind is ArrayKind.NUMPY else _torch_view(descriptor, view)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise CodecError("array", str(error)) from error

    def _frame_of(self, descriptor: Descriptor) -> memoryview:
        if descriptor.frame != self._next or descriptor.frame >= len(self._frames):
            raise ValueError(f"expected frame {self._next} of {len(self._frames)}, got {descriptor.frame}")
        if len(descriptor.shape) > _MAX_DIMENSIONS or any(length < 0 for length in descriptor.shape):
            raise ValueError(f"no array has the shape {descriptor.shape}")
        self._next += 1
        return memoryview(self._frames[descriptor.frame]).cast("B")


def _numpy_bytes(array: Any, np: Any) -> tuple[str, memoryview]:
    if array.dtype.kind not in NUMPY_KINDS or array.dtype.itemsize > 16:
        raise TypeError(f"an array of dtype {array.dtype} has no plain numbers")
    dense = np.asarray(array, order="C")
    return array.dtype.str, dense.reshape(-1).view(np.uint8).data


def _torch_bytes(tensor: Any, torch: Any) -> tuple[str, memoryview]:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or name not in TORCH_ITEM_BYTES:
        raise TypeError(
            f"a {name} tensor of layout {tensor.layout} on {tensor.device} cannot travel in a message"
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return name, memoryview(dense.reshape(-1).view(torch.uint8).numpy())


def _numpy_view(descriptor: Descriptor, view: memoryview) -> Any:
    np = importlib.import_module("numpy")
    dtype = np.dtype(descriptor.dtype)
    if dtype.str != descriptor.dtype or dtype.kind not in NUMPY_KINDS:
        raise ValueError(f"arrays of dtype {descriptor.dtype!r} do not travel")
    _check_size(descriptor, dtype.itemsize, view)
    array = np.frombuffer(view, np.uint8).view(dtype).reshape(descriptor.shape)
    return array if array.flags.aligned else array.copy()


def _torch_view(descriptor: Descriptor, view: memoryview) -> Any:
    item_bytes = TORCH_ITEM_BYTES.get(descriptor.dtype)
    if item_bytes is None:
        raise ValueError(f"tensors of dtype {descriptor.dtype!r} do not travel")
    _check_size(descriptor, item_bytes, view)
    np, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    dtype = getattr(torch, descriptor.dtype)
    if not descriptor.items:
        return torch.empty(descriptor.shape, dtype=dtype)
    raw = np.frombuffer(view, np.uint8)
    if view.readonly or raw.ctypes.data % item_bytes:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).reshape(descriptor.shape)


def _check_size(descriptor: Descriptor, item_bytes: int, view: memoryview) -> None:
    if descriptor.items * item_bytes != view.nbytes:
        raise ValueError(
            f"{descriptor.dtype} of shape {list(descriptor.shape)} takes {descriptor.items * item_bytes} "
            f"bytes, and the frame has {view.nbytes}"
        )
