"""What the DCS needs of GPUs, and nothing more; `ipc.Cuda` is the real thing.

A device is named by its UUID everywhere: its number differs between processes with different
CUDA_VISIBLE_DEVICES. The tests' stand-in keeps device memory in files, so that everything that is built on
this protocol runs, and is killed, on machines without a GPU.
"""

from typing import Protocol

from torch import Tensor

from relax_actor.errors import RelaxError


class DeviceError(RelaxError):
    """The driver refused something.

    Args:
        what: the operation.
        device: UUID of the GPU.
        nbytes: how much memory it was about.
        reason: what the driver says.
    """

    def __init__(self, what: str, device: str, nbytes: int, reason: str) -> None:
        self.what, self.device, self.nbytes, self.reason = what, device, nbytes, reason
        super().__init__(f"{what} of {nbytes} bytes on {device} failed: {reason}")


class UnknownDeviceError(RelaxError):
    """This process does not see the GPU.

    Args:
        device: its UUID.
        visible: the UUIDs that it sees.
    """

    def __init__(self, device: str, visible: tuple[str, ...]) -> None:
        self.device, self.visible = device, visible
        super().__init__(
            f"GPU {device} is not one of those that this process sees: {', '.join(visible) or 'none'}"
            "\n\nhint: start it without CUDA_VISIBLE_DEVICES"
        )


class Memory(Protocol):
    """Memory of a GPU, made here or opened from another process."""

    @property
    def device(self) -> str:
        """UUID of the GPU it lies on."""
        ...

    @property
    def data(self) -> Tensor:
        """All of it, uint8 [n] on that GPU. No view of it may be used after `close`."""
        ...

    @property
    def handle(self) -> bytes:
        """What another process opens it by."""
        ...

    def close(self) -> None:
        """Free it, or unmap what was opened. Idempotent."""
        ...


class Pinned(Protocol):
    """Host memory that is page-locked."""

    def close(self) -> None:
        """Unlock it. Idempotent."""
        ...


class Mark(Protocol):
    """A moment in a lane."""

    def is_done(self) -> bool:
        """Whether the GPU has come to it."""
        ...

    def synchronize(self) -> None:
        """Wait on the CPU until it has."""
        ...


class Lane(Protocol):
    """A stream of a GPU, for one thread; `with lane:` lets torch's operations queue up there."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def mark(self) -> Mark:
        """Return the moment after everything queued so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let what is queued from now on wait, on the GPU, for a moment of any lane."""
        ...

    def follow_current(self) -> None:
        """Let what is queued from now on come after everything queued on the thread's current stream."""
        ...


class Gpus(Protocol):
    """The GPUs that this process sees."""

    def uuids(self) -> tuple[str, ...]:
        """Return their UUIDs, by number."""
        ...

    def torch_device(self, device: str) -> str:
        """Return torch's name of a GPU in this process.

        Raises:
            UnknownDeviceError: the process does not see it.
        """
        ...

    def allocate(self, device: str, nbytes: int) -> Memory:
        """Make memory that other processes can open.

        Raises:
            DeviceError: there is not enough.
            UnknownDeviceError: the process does not see the GPU.
        """
        ...

    def open(self, device: str, handle: bytes, nbytes: int) -> Memory:
        """Map what another process on this host has allocated.

        Raises:
            DeviceError: it is not there any more.
            UnknownDeviceError: the process does not see the GPU.
        """
        ...

    def pin(self, address: int, nbytes: int) -> Pinned:
        """Page-lock host memory that is mapped already, so that GPUs read and write it at full speed.

        Raises:
            DeviceError: the driver refuses.
        """
        ...

    def lane(self, device: str) -> Lane:
        """Make a stream of a GPU."""
        ...

    def current_waits(self, device: str, mark: Mark) -> None:
        """Let what the thread's current stream is given from now on wait, on the GPU, for a moment."""
        ...

    def finish_current(self, device: str) -> None:
        """Wait on the CPU for everything that the thread's current stream was given."""
        ...
