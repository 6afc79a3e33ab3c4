"""Which device an actor computes on. Pure, but for `host_gpus`, which counts files and imports nothing.

`auto` is a GPU where the host has some, and the CPU elsewhere. The trainer has the first GPU; rollouts take
the others in turn, or the first one too where it is the only one.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_actor.config import RolloutConfig
from relax_actor.visible import visible_gpus

CPU = "cpu"
AUTO = "auto"
_CARD = re.compile(r"nvidia\d+")


def host_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Count the GPUs that this process could see, without a driver's library."""
    cards = sum(bool(_CARD.fullmatch(path.name)) for path in devices.glob("nvidia*"))
    visible = visible_gpus(env.get("CUDA_VISIBLE_DEVICES"))
    return cards if visible is None else min(cards, len(visible))


def trainer_device(setting: str, gpus: int) -> str:
    """Return torch's name of the trainer's device.

    Args:
        setting: `auto`, `cpu`, `cuda` or `cuda:N`.
        gpus: how many the host has.
    """
    if setting == AUTO:
        return "cuda:0" if gpus else CPU
    return "cuda:0" if setting == "cuda" else setting


def rollout_device(setting: str, replica: int, gpus: int) -> str:
    """Return torch's name of a replica's device; see `trainer_device`."""
    if setting not in {AUTO, "cuda"}:
        return setting
    if not gpus:
        return CPU if setting == AUTO else "cuda:0"
    return f"cuda:{1 + replica % (gpus - 1)}" if gpus > 1 else "cuda:0"


def replica_groups(setting: str, gpus: int, size: int) -> list[tuple[str, ...]]:
    """Return torch's names of the devices of every replica that there is room for; at least one.

    Args:
        setting: as of `trainer_device`; `cuda:N` is the first GPU of all replicas.
        gpus: how many the host has.
        size: GPUs of one replica.
    """
    if setting == CPU or (setting == AUTO and not gpus):
        return [(CPU,)]
    first = int(setting.partition(":")[2] or 0)
    if setting in {AUTO, "cuda"}:
        first = 1 if gpus > size else 0  # the trainer has the first one
    starts = range(first, max(gpus - size, first) + 1, size)
    if setting not in {AUTO, "cuda"}:
        starts = range(first, first + 1)
    return [tuple(f"cuda:{start + place}" for place in range(size)) for start in starts]


def trainer_gpus(setting: str, gpus: int) -> tuple[str, ...]:
    """Return torch's name of the trainer's GPU, if it has one; see `trainer_device`."""
    return _on_gpu(trainer_device(setting, gpus))


def rollout_gpus(rollout: RolloutConfig, gpus: int) -> tuple[str, ...]:
    """Return torch's names of the GPUs that any replica may have.

    Args:
        rollout: engine, replicas and device; a server's spares may have GPUs of their own.
        gpus: how many the host has.
    """
    if rollout.engine == "scripted":
        return ()
    if rollout.engine == "sglang":
        groups = replica_groups(rollout.device, gpus, rollout.gpus_each)
        used = groups if rollout.spares else groups[: rollout.replicas]
        return tuple(gpu for group in used for device in group for gpu in _on_gpu(device))
    devices = (rollout_device(rollout.device, replica, gpus) for replica in range(rollout.replicas))
    return tuple(dict.fromkeys(gpu for device in devices for gpu in _on_gpu(device)))


def visible_names(devices: Sequence[str], env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return what CUDA_VISIBLE_DEVICES of another process has to name for it to have these devices.

    Args:
        devices: torch's names in this process.
        env: of this process.
    """
    own = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    indices = [int(device.partition(":")[2] or 0) for device in devices if device != CPU]
    return tuple(own[index] if index < len(own) else str(index) for index in indices)


def _on_gpu(device: str) -> tuple[str, ...]:
    return () if device == CPU else (device,)
