"""By which ways a policy version reaches a replica, and which of them to try now.

`RouteBook` is pure: it knows what failed when, and says in which order to try. A route that failed to bring a
version rests for a while that doubles with every failure in a row, so that a replica with weights does not
read a damaged version again at every decode step; the next version is tried at once. A replica without
weights has nothing better to do: it tries all routes.
"""

from collections.abc import Iterable
from enum import StrEnum

from relax_actor.ids import PolicyVersion

FIRST_REST_S = 0.05
LONGEST_REST_S = 30.0


class Route(StrEnum):
    """The ways a policy version can take, the best first."""

    CUDA_IPC = "cuda_ipc"  # the trainer's snapshot on its GPU, over NVLink, into a ring on the replica's GPU
    PINNED = "pinned"  # the host's buckets, registered with CUDA, into a ring on the replica's GPU
    SHARED_MEMORY = "shared_memory"  # the host's buckets, copied by the replica itself
    PEER = "peer"  # what another replica has installed
    DISK = "disk"  # the newest checkpoint of the run


class RouteBook:
    """What is known of a replica's routes.

    Args:
        routes: those it has, in any order.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        has = set(routes)
        self._routes = tuple(route for route in Route if route in has)
        self._failures: dict[Route, int] = {}  # in a row
        self._rests: dict[Route, tuple[PolicyVersion, float]] = {}  # from which version, until when

    def order(self, version: PolicyVersion, now: float, *, is_urgent: bool) -> tuple[Route, ...]:
        """Return the routes to try, one after the other.

        Args:
            version: what is to be brought.
            now: seconds, as everywhere here on one monotonic clock.
            is_urgent: the replica has no weights to go on with, so resting routes are tried too, last.
        """
        live = tuple(route for route in self._routes if not self._is_resting(route, version, now))
        resting = tuple(route for route in self._routes if route not in live)
        return live + resting if is_urgent else live

    def failed(self, route: Route, version: PolicyVersion, now: float) -> None:
        """Let a route rest from a version, longer each time in a row."""
        failures = self._failures[route] = self._failures.get(route, 0) + 1
        rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(failures - 1, 30))
        self._rests[route] = (version, now + rest_s)

    def succeeded(self, route: Route) -> None:
        """Forget a route's failures."""
        self._failures.pop(route, None)
        self._rests.pop(route, None)

    def _is_resting(self, route: Route, version: PolicyVersion, now: float) -> bool:
        failed, until = self._rests.get(route, (version, now))
        return version == failed and now < until


def targets(
    offers: Iterable[PolicyVersion | None], installed: PolicyVersion | None, floor: PolicyVersion | None
) -> tuple[PolicyVersion, ...]:
    """Return the versions worth a pull, the newest first.

    Args:
        offers: what each source says is its newest; None is nothing.
        installed: what the replica samples from; None where it has no whole version.
        floor: the newest version it ever had whole: there is no way back behind it, but to it.
    """
    known = {offer for offer in offers if offer is not None}
    if installed is not None:
        return tuple(sorted((each for each in known if each > installed), reverse=True))
    return tuple(sorted((each for each in known if floor is None or each >= floor), reverse=True))
