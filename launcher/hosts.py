"""A host as a user names it, in a hostfile, in `--hosts` or by a scheduler. Pure."""

import re
from enum import StrEnum

import msgspec

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_LOOPBACK = re.compile(r"localhost|localhost\.localdomain|127(\.\d{1,3}){3}|::1")


class HostRole(StrEnum):
    """What a host is reserved for by `role=`; without one it takes anything."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class HostEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One host, with what was said of it."""

    name: str  # what ssh is told: a name, an alias of ~/.ssh/config or an IP address, without brackets
    user: str = ""
    port: int = 0  # of its sshd; 0: as the options or ssh's configuration say
    address: str = ""  # where its actors take calls of other hosts; empty: found by the route
    interface: str = ""
    role: HostRole | None = None
    slots: int | None = None  # GPUs, or actors where nothing needs a GPU; None: the host is asked
    gpus: tuple[str, ...] | None = None  # as CUDA_VISIBLE_DEVICES of the host names them, opaque
    where: str = ""  # `hostfile:3:1`, for errors

    @property
    def label(self) -> str:
        """The name as actors, logs and placements have it: `fd00::12` is `fd00--12`."""
        label = _UNSAFE.sub("-", self.name)
        return label if label[0].isalnum() else f"host{label}"

    @property
    def is_loopback(self) -> bool:
        """Whether the name means whichever host it is said on."""
        return _LOOPBACK.fullmatch(self.name.lower()) is not None

    @property
    def is_here(self) -> bool:
        """Whether it is reached without ssh: a loopback name for which neither port nor user is given."""
        return self.is_loopback and not self.port and not self.user

    @property
    def visible(self) -> tuple[str, ...] | None:
        """The GPUs that may be used, by number where only slots are known; None where nothing is."""
        if self.gpus is not None or self.slots is None:
            return self.gpus
        return tuple(map(str, range(self.slots)))
