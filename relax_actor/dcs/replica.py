"""A replica's weights: which version, by which route, and when to install the next one.

`refresh` is called between two decode steps. A replica that has weights follows the newest version that its
host announces, in turn with its neighbours. One that has none, or torn ones, tries every route to every
version that is not behind what it had; where none leads to one, it fails, and its next incarnation begins
anew. What it samples from is always whole, never older than before, and was read back.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from relax_actor.dcs.loans import Lender
from relax_actor.dcs.manifest import Manifest
from relax_actor.dcs.probe import install_probed
from relax_actor.dcs.puller import ROUTE_ERRORS, NoRouteError, PolicyPuller, Pulled, RouteFailure
from relax_actor.dcs.replica_states import SAMPLING, WeightsState, WeightsTrigger, move
from relax_actor.dcs.routes import targets
from relax_actor.dcs.source import PolicySource
from relax_actor.dcs.turns import WITHOUT, InstallTurns, Turn, may_wait
from relax_actor.ids import PolicyVersion
from relax_actor.telemetry import EventLog
from transport.clock import Clock, SystemClock

if TYPE_CHECKING:
    from torch import Tensor

    from relax_actor.engines.base import Engine

SETTLE_S = 1.0
"""How long what others say is published has for coming to this host by itself."""

PATIENCE_S = 30.0
"""How long a new replica looks for a version that is published before it gives up."""

LOOK_S = 0.05
"""How often a replica looks for a version that it knows of and does not have."""

RETRY_S = 0.5
"""How soon a version that no route brought is tried again."""


class Replica:
    """Keeps an engine at the newest policy version.

    Args:
        engine: whose weights they are; without a version.
        sources: at most one of each route.
        announced: the newest version on this host; called at every step.
        lender: of the same engine.
        turns: of this host.
        max_staleness: as `run.max_staleness`.
        events: where installs and failures are written.
        clock: what patience runs by.
    """

    def __init__(
        self,
        engine: "Engine",
        sources: Sequence[PolicySource],
        *,
        announced: Callable[[], PolicyVersion | None],
        lender: Lender,
        turns: InstallTurns,
        max_staleness: int,
        events: EventLog,
        clock: Clock | None = None,
    ) -> None:
        self._engine, self._announced = engine, announced
        self._lender, self._turns, self._max_staleness = lender, turns, max_staleness
        self._events, self._clock = events, clock or SystemClock()
        self._puller = PolicyPuller(sources, on_failure=self._say_failure, clock=clock)
        self._state = WeightsState.EMPTY
        self._floor: PolicyVersion | None = None
        self._told: PolicyVersion | None = None
        self._told_at = 0.0
        self._refused_version: PolicyVersion | None = None
        self._waits_since: float | None = None
        self._lost_since: float | None = None
        self._retry_at = 0.0

    @property
    def state(self) -> WeightsState:
        """What the weights are now."""
        return self._state

    @property
    def can_sample(self) -> bool:
        """Whether a whole version is installed."""
        return self._state in SAMPLING

    @property
    def is_behind(self) -> bool:
        """Whether a version is known to be published, here or elsewhere, and not installed."""
        known = [version for version in (self._announced(), self._told) if version is not None]
        return self._is_newer(max(known, default=None))

    def told(self, newest: PolicyVersion) -> None:
        """Learn from elsewhere that a version is published."""
        if self._told is None or newest > self._told:
            self._told, self._told_at = newest, self._clock.monotonic()

    def refresh(self) -> None:
        """Install what is newer, if there is something and it is time.

        Raises:
            NoRouteError: the replica has no whole version, and none of its routes leads to one.
        """
        newest = self._newest()
        if not self.can_sample:
            self._recover(newest)
        elif newest is not None and self._is_newer(newest):
            self._follow(newest)

    def slept(self) -> None:
        """Learn that the engine has no weights any more; `refresh` installs some when it is awake again."""
        self._waits_since = self._lost_since = None
        self._retry_at = 0.0
        self._move(WeightsTrigger.ASLEEP)

    # -- with weights ---------------------------------------------------------------------------

    def _follow(self, newest: PolicyVersion) -> None:
        if newest == self._refused_version and self._clock.monotonic() < self._retry_at:
            return
        turn = self._turn(newest)
        if turn is None:
            self._wait()
            return
        with turn:
            try:
                self._pull(newest, is_urgent=False)
            except NoRouteError as error:
                self._refused(error)

    def _turn(self, newest: PolicyVersion) -> Turn | None:
        """Return a turn, none at all where it is better to wait, and an empty one where that is too late."""
        waits = may_wait(
            self._engine.version,
            newest,
            in_flight=self._engine.in_flight,
            max_staleness=self._max_staleness,
        )
        if waits and (not self._puller.prepare(newest) or self._lender.is_lending):
            return None
        turn = self._turns.take()
        return turn if turn is not None or waits else WITHOUT

    def _wait(self) -> None:
        if self._waits_since is None:
            self._waits_since = self._clock.monotonic()
        if self._state is WeightsState.SERVING:
            self._move(WeightsTrigger.NEWER)

    def _refused(self, error: NoRouteError) -> None:
        """Go on with the old weights, unless some of the new ones are among them by now."""
        if error.failures:
            self._events.emit("install_refused", version=error.version, reason=str(error))
        if self._state is WeightsState.TORN:
            self._recover(error.version)
        else:
            self._refused_version, self._retry_at = error.version, self._clock.monotonic() + RETRY_S

    # -- without --------------------------------------------------------------------------------

    def _recover(self, newest: PolicyVersion | None) -> None:
        now = self._clock.monotonic()
        if newest is None or (self._state is WeightsState.EMPTY and now < self._retry_at):
            return
        self._lost_since = now if self._lost_since is None else self._lost_since
        failures = list(self._failures_on_all_routes(newest))
        if self.can_sample:
            return
        self._retry_at = self._clock.monotonic() + RETRY_S
        # One that has samples in flight cannot go on with them; one that is empty has nothing to lose.
        if self._state is not WeightsState.EMPTY or now - self._lost_since >= PATIENCE_S:
            self._move(WeightsTrigger.NO_ROUTE)
            raise failures[0]

    def _failures_on_all_routes(self, newest: PolicyVersion) -> Iterator[NoRouteError]:
        """Try all routes to every version in question until one is installed; yield what failed."""
        for version in self._candidates(newest):
            try:
                self._pull(version, is_urgent=True)
            except NoRouteError as error:
                yield error
            else:
                return

    def _candidates(self, newest: PolicyVersion) -> Iterator[PolicyVersion]:
        """Yield the newest version that is known of, then what the sources offer instead."""
        yield newest
        for version in targets(self._puller.latest().values(), None, self._floor):
            if version != newest:
                yield version

    # -- both -----------------------------------------------------------------------------------

    def _newest(self) -> PolicyVersion | None:
        """Return what the host announces; what others said only where it has not come for a while."""
        announced = self._announced()
        if self._told is None or (announced is not None and announced >= self._told):
            return announced
        has_settled = self._clock.monotonic() - self._told_at >= SETTLE_S
        return self._told if has_settled else announced

    def _is_newer(self, version: PolicyVersion | None) -> bool:
        installed = self._engine.version
        return version is not None and (installed is None or version > installed)

    def _pull(self, version: PolicyVersion, *, is_urgent: bool) -> None:
        with self._events.span("install", version=version):
            pulled = self._puller.pull(self._install, version, is_urgent=is_urgent)
        self._say_installed(pulled)
        self._waits_since = self._lost_since = None

    def _install(self, manifest: Manifest, tensors: "Iterator[tuple[str, Tensor]]") -> None:
        self._move(WeightsTrigger.COPY)
        try:
            install_probed(self._engine, manifest, tensors)
        except ROUTE_ERRORS:
            self._move(WeightsTrigger.BROKEN)
            raise
        self._move(WeightsTrigger.WHOLE)
        self._floor = manifest.version
        self._lender.installed(manifest)

    def _move(self, trigger: WeightsTrigger) -> None:
        self._state = move(self._state, trigger)

    def _say_installed(self, pulled: Pulled) -> None:
        waited_s = 0.0 if self._waits_since is None else self._clock.monotonic() - self._waits_since
        self._events.emit(
            "policy_installed",
            version=pulled.version,
            seconds=pulled.seconds,
            route=pulled.route,
            nbytes=pulled.manifest.nbytes,
            waited_s=max(0.0, waited_s - pulled.seconds),
            failed_routes=[failure.route for failure in pulled.failures],
        )

    def _say_failure(self, version: PolicyVersion, failure: RouteFailure) -> None:
        self._events.emit("route_failed", version=version, route=failure.route, reason=failure.reason)
