"""The real GPUs: device memory that other processes open, and host memory that GPUs read at full speed.

torch shares device memory by files that count references and by a producer that must outlive its readers;
here either side may be killed at any moment, so memory is allocated, exported and opened by the CUDA runtime
itself (the library that torch has loaded already) and only shown to torch as tensors. An opened mapping stays
valid when the process that made it dies; its bytes just stop changing.

Source:
    CUDA Runtime API: cudaIpcGetMemHandle, cudaIpcOpenMemHandle, cudaHostRegister.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_actor.dcs.cuda.device import DeviceError, Lane, Mark, Memory, Pinned, UnknownDeviceError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_PORTABLE = 1  # cudaHostRegisterPortable: locked for all GPUs, not for the current one only


class Cuda:
    """The GPUs that this process sees; the first call makes a CUDA context, after which it must not fork."""

    def __init__(self) -> None:
        self._runtime = _Runtime()
        self._uuids = tuple(
            f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            for index in range(torch.cuda.device_count())
        )

    def uuids(self) -> tuple[str, ...]:
        """Return their UUIDs, by number."""
        return self._uuids

    def torch_device(self, device: str) -> str:
        """Return `cuda:N`; raises `UnknownDeviceError`."""
        return f"cuda:{self._index(device)}"

    def allocate(self, device: str, nbytes: int) -> Memory:
        """Make memory that other processes can open; see `Gpus`."""
        index = self._index(device)
        runtime = self._runtime
        pointer = runtime.pointer(
            index,
            lambda out: runtime.lib.cudaMalloc(out, ctypes.c_size_t(nbytes)),
            ("allocation", device, nbytes),
        )
        memory = _Memory(self, device, pointer, nbytes, runtime.lib.cudaFree)
        try:
            memory.handle = runtime.exported(index, pointer, ("export", device, nbytes))
        except DeviceError:
            memory.close()
            raise
        return memory

    def open(self, device: str, handle: bytes, nbytes: int) -> Memory:
        """Map what another process has allocated; see `Gpus`."""
        index = self._index(device)
        raw = _Handle.from_buffer_copy(handle)
        lib = self._runtime.lib
        pointer = self._runtime.pointer(
            index,
            lambda out: lib.cudaIpcOpenMemHandle(out, raw, _LAZY_PEER_ACCESS),
            ("opening", device, nbytes),
        )
        memory = _Memory(self, device, pointer, nbytes, lib.cudaIpcCloseMemHandle)
        memory.handle = handle
        return memory

    def pin(self, address: int, nbytes: int) -> Pinned:
        """Page-lock host memory; see `Gpus`."""
        lib = self._runtime.lib
        arguments = (ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE)
        reason = self._runtime.call(lib.cudaHostRegister, *arguments)
        if reason:
            raise DeviceError("page-locking", "the host", nbytes, reason)
        return _Pinned(lambda: self._runtime.call(lib.cudaHostUnregister, arguments[0]))

    def lane(self, device: str) -> Lane:
        """Make a stream of a GPU."""
        return _Stream(self._index(device))

    def current_waits(self, device: str, mark: Mark) -> None:
        """Let the thread's current stream wait for a moment."""
        torch.cuda.current_stream(self._index(device)).wait_event(_event(mark))

    def finish_current(self, device: str) -> None:
        """Wait for the thread's current stream."""
        torch.cuda.current_stream(self._index(device)).synchronize()

    def close_memory(self, device: str, function: Callable[[Any], int], pointer: int) -> None:
        """Free or unmap; an error is of no use to anybody."""
        index = self._index(device)
        with torch.cuda.device(index):
            self._runtime.call(function, ctypes.c_void_p(pointer))

    def _index(self, device: str) -> int:
        if device not in self._uuids:
            raise UnknownDeviceError(device, self._uuids)
        return self._uuids.index(device)


def current_device(cuda: Cuda) -> str:
    """Return the UUID of torch's current GPU."""
    return cuda.uuids()[torch.cuda.current_device()]


class _Memory:
    """Device memory as a tensor."""

    handle = b""

    def __init__(
        self, cuda: Cuda, device: str, pointer: int, nbytes: int, free: Callable[[Any], int]
    ) -> None:
        self.device = device
        self._cuda, self._pointer, self._free = cuda, pointer, free
        self._data: Tensor | None = torch.as_tensor(_Raw(pointer, nbytes), device=cuda.torch_device(device))
        if self._data.data_ptr() != pointer:  # pragma: no cover - torch would have copied
            raise DeviceError("showing to torch", device, nbytes, "the tensor is a copy")

    @property
    def data(self) -> Tensor:
        """All of it; see `Memory`."""
        if self._data is None:
            raise ValueError(f"memory of {self.device} is closed")
        return self._data

    def close(self) -> None:
        """Free or unmap it. Idempotent."""
        if self._data is not None:
            self._data = None
            self._cuda.close_memory(self.device, self._free, self._pointer)


class _Raw:
    """Bytes at an address, in the words that torch and others understand."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


class _Pinned:
    """Host memory that is page-locked."""

    def __init__(self, unlock: Callable[[], object]) -> None:
        self._unlock: Callable[[], object] | None = unlock

    def close(self) -> None:
        """Unlock it. Idempotent."""
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Runtime:
    """The CUDA runtime library that torch uses."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch types it not
        self.lib = ctypes.CDLL(_library())
        self.lib.cudaGetErrorString.restype = ctypes.c_char_p
        self.lib.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]

    def call(self, function: Callable[..., int], *arguments: object) -> str:
        """Return what went wrong, or nothing."""
        code = function(*arguments)
        if not code:
            return ""
        self.lib.cudaGetLastError()  # else torch would find it at its next kernel
        return f"{self.lib.cudaGetErrorString(code).decode()} (CUDA error {code})"

    def pointer(self, index: int, function: Callable[[Any], int], what: tuple[str, str, int]) -> int:
        """Call what returns an address through its first argument."""
        out = ctypes.c_void_p()
        with torch.cuda.device(index):
            self.lib.cudaSetDevice(index)
            reason = self.call(function, ctypes.byref(out))
        if reason or out.value is None:
            raise DeviceError(*what, reason or "no address")
        return out.value

    def exported(self, index: int, pointer: int, what: tuple[str, str, int]) -> bytes:
        """Return the handle of an allocation."""
        handle = _Handle()
        with torch.cuda.device(index):
            reason = self.call(self.lib.cudaIpcGetMemHandle, ctypes.byref(handle), ctypes.c_void_p(pointer))
        if reason:
            raise DeviceError(*what, reason)
        return bytes(handle)


class _Stream:
    """A torch stream."""

    def __init__(self, index: int) -> None:
        self._stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]  # torch types it not
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> object:
        context = torch.cuda.stream(self._stream)
        context.__enter__()  # type: ignore[no-untyped-call]  # torch types it not
        self._entered.append(context)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def mark(self) -> Mark:
        """Return the moment after everything queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch types it not
        event.record(self._stream)
        return _Event(event)

    def wait(self, mark: Mark) -> None:
        """Let what comes wait for a moment."""
        self._stream.wait_event(_event(mark))

    def follow_current(self) -> None:
        """Let what comes follow the thread's current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))


class _Event:
    """A torch event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        """Whether the GPU has come to it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch types it not

    def synchronize(self) -> None:
        """Wait for it."""
        self.event.synchronize()


def _event(mark: Mark) -> torch.cuda.Event:
    if not isinstance(mark, _Event):
        raise TypeError(f"{type(mark).__name__} is no moment of a CUDA stream")
    return mark.event


def _library() -> str:
    """Return the path of the runtime that torch has loaded; two would not know of one another's errors."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcudart" in path:
            return path
    return f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
