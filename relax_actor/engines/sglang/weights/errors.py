"""What can go wrong with a server's weights."""

from relax_actor.errors import RelaxError
from relax_actor.ids import PolicyVersion


class SglangUpdateError(RelaxError):
    """The server's weights are in doubt: kill it, and install into a new one.

    Args:
        step: of the update, the one that failed.
        version: the policy version that was being installed; None for memory given back.
        reason: what was seen.
    """

    def __init__(self, step: str, version: PolicyVersion | None, reason: str) -> None:
        self.step, self.version, self.reason = step, version, reason
        what = "the server's memory" if version is None else f"policy version {version}"
        super().__init__(f"step `{step}` of {what} failed: {reason}")


class RouteClosedError(RelaxError):
    """Weights cannot go this way; nothing was touched, so another one may be tried.

    Args:
        route: which one.
        reason: why not.
    """

    def __init__(self, route: str, reason: str) -> None:
        self.route, self.reason = route, reason
        super().__init__(f"weights cannot be sent by `{route}`: {reason}")


class DigestError(RelaxError):
    """Two replicas have installed the same policy version and hold different weights.

    Args:
        version: the policy version.
        topology: what the digests have in common.
        expected: what the first replica to install it has written down.
        found: that of this server.
    """

    def __init__(self, version: PolicyVersion, topology: str, expected: str, found: str) -> None:
        self.version, self.topology = version, topology
        self.expected, self.found = expected, found
        super().__init__(
            f"the weights of policy version {version} ({topology}) have digest {found}, "
            f"another replica's {expected}"
        )
