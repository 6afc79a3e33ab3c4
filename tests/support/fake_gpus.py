"""GPUs made of files: memory that other processes map, streams that are done at once.

What tests/gpu shows of the real ones holds here as well: memory is opened by a handle, a handle of a process
that has ended opens nothing, and what was opened before stays readable.
"""

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch

from relax_actor.dcs.cuda.device import DeviceError, UnknownDeviceError


class FakeGpus:
    """A protocol `Gpus` over a folder.

    Args:
        root: where device memory lies, the same for all processes of a test.
        uuids: the GPUs this process sees, in its own order.
        capacity: bytes of one GPU's memory that this process may allocate.
    """

    def __init__(self, root, uuids=("GPU-a", "GPU-b"), capacity=1 << 40):
        self.root, self._uuids, self._left = Path(root), tuple(uuids), capacity
        self.pinned = {}

    def uuids(self):
        return self._uuids

    def torch_device(self, device):
        if device not in self._uuids:
            raise UnknownDeviceError(device, self._uuids)
        return "cpu"

    def allocate(self, device, nbytes):
        self.torch_device(device)
        if nbytes > self._left:
            raise DeviceError("allocation", device, nbytes, "out of memory")
        self._left -= nbytes
        path = self.root / f"{device}.{os.getpid()}.{secrets.token_hex(4)}"
        path.write_bytes(b"")
        os.truncate(path, nbytes)
        return FakeMemory(device, path, nbytes, owned=True)

    def open(self, device, handle, nbytes):
        self.torch_device(device)
        path = self.root / handle.decode()
        if _is_alive(int(path.name.split(".")[1])):
            with suppress(FileNotFoundError):
                return FakeMemory(device, path, nbytes, owned=False)
        raise DeviceError("opening", device, nbytes, "invalid resource handle")

    def pin(self, address, nbytes):
        if address in self.pinned:
            raise DeviceError("page-locking", "the host", nbytes, "already registered")
        self.pinned[address] = nbytes
        return FakePin(self.pinned, address)

    def lane(self, device):
        self.torch_device(device)
        return FakeLane()

    def current_waits(self, device, mark):
        self.torch_device(device)
        mark.synchronize()

    def finish_current(self, device):
        self.torch_device(device)


def left_behind(root):
    """Return what living processes have not freed; a GPU frees what was a dead one's by itself."""
    return [path for path in Path(root).iterdir() if _is_alive(int(path.name.split(".")[1]))]


class FakeMemory:
    def __init__(self, device, path, nbytes, *, owned):
        self.device, self._path, self._owned = device, path, owned
        with path.open("r+b") as file:
            self._data = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        self.handle = path.name.encode()

    @property
    def data(self):
        assert self._data is not None, "memory is closed"
        return self._data

    def close(self):
        self._data = None
        if self._owned:
            self._path.unlink(missing_ok=True)


class FakePin:
    def __init__(self, pinned, address):
        self._pinned, self._address = pinned, address

    def close(self):
        self._pinned.pop(self._address, None)


class FakeLane:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def mark(self):
        return FakeMark()

    def wait(self, mark):
        mark.synchronize()

    def follow_current(self):
        pass


class FakeMark:
    def is_done(self):
        return True

    def synchronize(self):
        pass


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
