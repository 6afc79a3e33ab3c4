"""Which GPUs a replica has, where more of its kind than there are seats come and go: whoever locks them.

A lock is a file in the run folder, held by a descriptor that the replica's server inherits: it is free again
when both are dead, however they died.
"""

import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from relax_actor.errors import RelaxError


class NoFreeDeviceError(RelaxError):
    """All GPUs that a replica could have are taken.

    Args:
        groups: what it could have had.
    """

    def __init__(self, groups: Sequence[tuple[str, ...]]) -> None:
        self.groups = tuple(groups)
        taken = "; ".join(", ".join(group) for group in groups)
        super().__init__(f"every GPU is taken by another replica: {taken}\n\nhint: lower rollout.spares")


class Claim:
    """Devices that nobody else has, as long as `fd` is open here or in another process.

    Args:
        devices: torch's names.
        fd: the lock's.
    """

    def __init__(self, devices: tuple[str, ...], fd: int) -> None:
        self.devices, self.fd = devices, fd


def claim(folder: Path, groups: Sequence[tuple[str, ...]], *, first: int) -> Claim:
    """Take devices that are free.

    Args:
        folder: where the locks of all replicas of this run are.
        groups: what there is.
        first: which of them is tried first.

    Raises:
        NoFreeDeviceError: there are none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(len(groups)):
        group = groups[(first + place) % len(groups)]
        name = f"{socket.gethostname()}-{'-'.join(group).replace(':', '')}.lock"
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return Claim(group, fd)
    raise NoFreeDeviceError(groups)
