"""Brings a policy version into a replica by the best route that works.

The puller knows nothing of engines: `install` copies the tensors it is given, and raises what the source
raises on the way. After such a failure the replica's weights are torn, and only a complete pull, by any
route, makes them whole; so the puller goes on to the next one at once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from relax_actor.dcs.manifest import Manifest, PolicyCorruptError
from relax_actor.dcs.probe import ProbeError
from relax_actor.dcs.receiver import PolicyMissingError
from relax_actor.dcs.routes import Route, RouteBook
from relax_actor.dcs.source import PolicySource, PreparedSource, SourceUnavailableError
from relax_actor.errors import RelaxError
from relax_actor.ids import PolicyVersion
from transport.clock import Clock, SystemClock

if TYPE_CHECKING:
    from torch import Tensor

Install = Callable[[Manifest, "Iterator[tuple[str, Tensor]]"], None]
"""Copies all tensors, and returns only if they are all in place and whole."""

ROUTE_ERRORS = (SourceUnavailableError, PolicyMissingError, PolicyCorruptError, ProbeError)
"""What another route may do better."""


class RouteFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a route did not bring the version."""

    route: Route
    reason: str


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is in place."""

    manifest: Manifest
    route: Route
    seconds: float
    failures: tuple[RouteFailure, ...]  # of the better routes, in the order of trying

    @property
    def version(self) -> PolicyVersion:
        """Which policy version."""
        return self.manifest.version


class NoRouteError(RelaxError):
    """No route brought the version.

    Args:
        version: the policy version.
        failures: every route that was tried, and why it failed.
    """

    def __init__(self, version: PolicyVersion, failures: Sequence[RouteFailure]) -> None:
        self.version, self.failures = version, tuple(failures)
        tried = "".join(f"\n  {each.route}: {each.reason}" for each in failures) or "\n  all of them rest"
        super().__init__(f"no route brought policy version {version}:{tried}")


class PolicyPuller:
    """Tries sources, the best route first.

    Args:
        sources: at most one of each route.
        on_failure: told the version and the failure of each route that did not bring it.
        clock: what routes rest on.
    """

    def __init__(
        self,
        sources: Sequence[PolicySource],
        *,
        on_failure: Callable[[PolicyVersion, RouteFailure], None] = lambda *_: None,
        clock: Clock | None = None,
    ) -> None:
        self._sources = {source.route: source for source in sources}
        self._book = RouteBook(self._sources)
        self._on_failure = on_failure
        self._clock = clock or SystemClock()

    def latest(self) -> dict[Route, PolicyVersion]:
        """Return the newest version that each source knows of."""
        newest = {route: source.latest() for route, source in self._sources.items()}
        return {route: version for route, version in newest.items() if version is not None}

    def prepare(self, version: PolicyVersion) -> bool:
        """Do what can be done while the replica still decodes; return whether that is all done."""
        routes = self._book.order(version, self._clock.monotonic(), is_urgent=False)
        source = self._sources[routes[0]] if routes else None
        return not isinstance(source, PreparedSource) or source.prepare(version)

    def pull(self, install: Install, version: PolicyVersion, *, is_urgent: bool = True) -> Pulled:
        """Install a version by the first route that brings all of it.

        Args:
            install: copies the weights.
            version: which one.
            is_urgent: try also routes that failed a moment ago.

        Raises:
            NoRouteError: none did; if one failed half way, the replica's weights are torn.
        """
        failures: list[RouteFailure] = []
        for route in self._book.order(version, self._clock.monotonic(), is_urgent=is_urgent):
            started = time.perf_counter()
            try:
                manifest = self._install_by(route, install, version)
            except ROUTE_ERRORS as error:
                failures.append(self._failed(route, version, error))
                continue
            self._book.succeeded(route)
            seconds = time.perf_counter() - started
            return Pulled(manifest=manifest, route=route, seconds=seconds, failures=tuple(failures))
        raise NoRouteError(version, failures)

    def _install_by(self, route: Route, install: Install, version: PolicyVersion) -> Manifest:
        with self._sources[route].open(version) as opened:
            install(opened.manifest, opened.tensors())
            return opened.manifest

    def _failed(self, route: Route, version: PolicyVersion, error: RelaxError) -> RouteFailure:
        failure = RouteFailure(route=route, reason=str(error))
        if not isinstance(error, PolicyMissingError):  # it leads elsewhere, which is no fault
            self._book.failed(route, version, self._clock.monotonic())
        self._on_failure(version, failure)
        return failure
