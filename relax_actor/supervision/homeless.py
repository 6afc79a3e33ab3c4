"""Which actors wait for a host that is away. Read by any thread, changed by one."""

from collections.abc import Mapping
from types import MappingProxyType


class Homeless:
    """The actors that wait for a host.

    Attributes:
        why: host and reason of each; replaced, never changed, so that any thread may look.
    """

    def __init__(self) -> None:
        self.why: Mapping[str, str] = MappingProxyType({})

    def wait(self, name: str, host: str, absence: str) -> None:
        """Note that an actor waits for a host, and why that is away."""
        self.why = {**self.why, name: f"{host}: {absence}"}

    def settle(self, name: str) -> bool:
        """Note that an actor waits no more; return whether it did."""
        did_wait = name in self.why
        self.why = {other: why for other, why in self.why.items() if other != name}
        return did_wait
