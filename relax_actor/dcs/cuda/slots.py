"""Rings of slots on GPUs, lent to one transfer at a time and kept for the next."""

import threading
from collections.abc import Sequence

from torch import Tensor

from relax_actor.dcs.cuda.device import Gpus, Memory

_ALIGN_BYTES = 512


class Slots:
    """The slots of one ring.

    Attributes:
        device: UUID of their GPU.
        slot_bytes: the size of each.
    """

    def __init__(self, gpus: Gpus, device: str, slot_bytes: int, count: int) -> None:
        self.device, self.slot_bytes = device, slot_bytes
        self._memory: list[Memory] = []
        try:
            for _ in range(count):
                self._memory.append(gpus.allocate(device, slot_bytes))
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> tuple[bytes, ...]:
        """What a replica opens them by."""
        return tuple(memory.handle for memory in self._memory)

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, index: int) -> Tensor:
        """Return a slot, uint8 [slot_bytes]."""
        return self._memory[index].data

    def close(self) -> None:
        """Free them. Idempotent."""
        while self._memory:
            self._memory.pop().close()


class OpenedSlots:
    """A ring as a replica sees it; kept from transfer to transfer, since opening takes its time.

    Args:
        gpus: of the replica.
        device: UUID of its GPU.
    """

    def __init__(self, gpus: Gpus, device: str) -> None:
        self._gpus, self._device = gpus, device
        self._handles: tuple[bytes, ...] = ()
        self._memory: list[Memory] = []

    def open(self, handles: Sequence[bytes], slot_bytes: int) -> list[Tensor]:
        """Return the slots, uint8 [slot_bytes] each.

        Raises:
            DeviceError: they are gone.
        """
        if tuple(handles) != self._handles:
            self.close()
            self._memory = [self._gpus.open(self._device, handle, slot_bytes) for handle in handles]
            self._handles = tuple(handles)
        return [memory.data for memory in self._memory]

    def close(self) -> None:
        """Let go of them. Idempotent."""
        self._handles = ()
        while self._memory:
            self._memory.pop().close()


class SlotStock:
    """All rings of a store, kept until its end: a replica may still have them open. Safe in several threads.

    Args:
        gpus: where they lie.
        slot_bytes: the size of a slot, at most.
        slots: how many a ring has.
    """

    def __init__(self, gpus: Gpus, *, slot_bytes: int, slots: int) -> None:
        self._gpus, self._slot_bytes, self._slots = gpus, slot_bytes, slots
        self._lock = threading.Lock()
        self._idle: dict[str, list[Slots]] = {}

    def take(self, device: str, largest_bytes: int) -> Slots:
        """Lend a ring on a GPU; a new one has room for buckets of up to `largest_bytes`, if it may.

        Raises:
            DeviceError: the GPU has no room for one.
            UnknownDeviceError: this process does not see the GPU.
        """
        with self._lock:
            if idle := self._idle.get(device):
                return idle.pop()
        wanted_bytes = min(self._slot_bytes, -(-largest_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
        return Slots(self._gpus, device, wanted_bytes, self._slots)

    def put_back(self, slots: Slots) -> None:
        """Take a ring back for the next transfer to that GPU."""
        with self._lock:
            self._idle.setdefault(slots.device, []).append(slots)

    def close(self) -> None:
        """Free what is idle."""
        with self._lock:
            for slots in self._idle.values():
                for each in slots:
                    each.close()
            self._idle.clear()
