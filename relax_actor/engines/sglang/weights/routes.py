"""Which ways weights can take into a server, the best first. Pure."""

from enum import StrEnum

import msgspec


class UpdateRoute(StrEnum):
    """The ways, the best first."""

    IPC = "ipc"  # a handle of a bucket on the GPU; on a CPU the bytes themselves
    GROUP = "group"  # a broadcast from this process to all ranks
    DISK = "disk"  # files that the server reads itself: of shared memory, or a checkpoint


class Backend(StrEnum):
    """What carries a broadcast."""

    NCCL = "nccl"
    GLOO = "gloo"


class WeightPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the weights come from, and where they go to."""

    device: str = "cpu"
    """Of this process, as torch names it: where its buckets are."""
    server_devices: tuple[str, ...] = ("cpu",)
    """Of the server's ranks on this host, under the names they have in this process."""
    ranks: int = 1
    """Of the server, over all hosts."""
    hosts: int = 1
    address: str = "127.0.0.1"
    """Of this host, as the others reach it."""


def candidates(
    placement: WeightPlacement, allowed: tuple[UpdateRoute, ...], *, has_files: bool
) -> tuple[UpdateRoute, ...]:
    """Return the routes worth trying, the best first.

    Args:
        placement: of both sides.
        allowed: by the settings.
        has_files: whether versions can be found as files.
    """
    open_routes = {UpdateRoute.GROUP}
    if is_reachable(placement):
        open_routes.add(UpdateRoute.IPC)
    if has_files and placement.hosts == 1:
        open_routes.add(UpdateRoute.DISK)
    return tuple(route for route in UpdateRoute if route in open_routes and route in allowed)


def is_reachable(placement: WeightPlacement) -> bool:
    """Whether every rank can open what this process has in its memory."""
    return placement.hosts == 1 and placement.device in placement.server_devices


def group_backend(placement: WeightPlacement) -> Backend:
    """Return what can connect both sides: NCCL refuses two members on one GPU."""
    is_own_gpu = placement.device != "cpu" and placement.device not in placement.server_devices
    return Backend.NCCL if is_own_gpu else Backend.GLOO
