"""The gate of GONE: a device is free again only when nothing of the dead actor holds its memory.

A process is reaped before or after its device memory is back, depending on the driver, and a child that
escaped keeps it for good. Whoever restarts an actor on the device before that meets "out of memory"; so the
agent waits here, and names who holds the memory if it does not come back.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RELEASE_DEADLINE_S = 30.0
POLL_S = 0.02
_MIB = 1024 * 1024
_GPU = re.compile(r"(?:(?:cuda|gpu):)?(\d+)")


class DeviceGate:
    """Knows which of an actor's processes still hold memory of its devices.

    Args:
        nvml: the module `pynvml` or one like it; None where there is no NVIDIA driver: nothing is held then.
    """

    def __init__(self, nvml: Any | None) -> None:
        self._nvml = nvml

    @classmethod
    def of_this_host(cls) -> "DeviceGate":
        """Return the gate over this host's driver, if it has one."""
        try:
            import pynvml  # noqa: PLC0415 - only hosts that run device actors pay for it

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no library, no driver, no right: no gate
            return cls(None)
        return cls(pynvml)

    def holders(self, devices: Sequence[str], is_of_actor: Callable[[int], bool]) -> list[str]:
        """Return who still holds memory, in words, such as `GPU 5 still holds 812 MiB of pid 4711 (python)`.

        Args:
            devices: `cuda:N`, `gpu:N` or `N`, as in the child spec; others have no memory of their own.
            is_of_actor: whether a pid belongs to the dead actor.
        """
        return [
            f"GPU {index} still holds {used_mib} MiB of pid {pid} ({_name_of(pid)})"
            for index in _indices(devices)
            for pid, used_mib in self._users(index)
            if is_of_actor(pid)
        ]

    def _users(self, index: int) -> list[tuple[int, int]]:
        if self._nvml is None:
            return []
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            users = [
                *self._nvml.nvmlDeviceGetComputeRunningProcesses(handle),
                *self._nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            ]
        except self._nvml.NVMLError:  # a card that is lost holds nothing that could be waited for
            return []
        return [(user.pid, (user.usedGpuMemory or 0) // _MIB) for user in users]


async def await_release(
    gate: DeviceGate, devices: Sequence[str], is_of_actor: Callable[[int], bool], deadline_s: float
) -> str:
    """Return once nothing of the actor holds memory of its devices, or say who still does at the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        holders = await asyncio.to_thread(gate.holders, devices, is_of_actor)  # the driver may take its time
        if not holders or time.monotonic() >= end_s:
            return "; ".join(holders)
        await asyncio.sleep(POLL_S)


def _indices(devices: Sequence[str]) -> list[int]:
    return [int(match[1]) for device in devices if (match := _GPU.fullmatch(device))]


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "its process is gone"
