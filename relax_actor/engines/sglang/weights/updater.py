"""Installs policy versions into a running server: prepare a way, pause, load, check, go on.

Nothing is touched until a way is open and its first bucket is full; what fails until then leaves the server
as it was. Whatever fails afterwards is an `SglangUpdateError` or a `DigestError`, and the server, which is
left paused, is to be killed: weights that are in doubt are never sampled from.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from relax_actor.engines.sglang.weights.calls import Calls
from relax_actor.engines.sglang.weights.disk import DiskWay, VersionFiles
from relax_actor.engines.sglang.weights.errors import RouteClosedError, SglangUpdateError
from relax_actor.engines.sglang.weights.ipc import IpcWay
from relax_actor.engines.sglang.weights.payload import Bucket
from relax_actor.engines.sglang.weights.plan import Step, UpdateMode, plan
from relax_actor.engines.sglang.weights.records import Client, Facts, UpdateReport, UpdateSettings
from relax_actor.engines.sglang.weights.routes import UpdateRoute, WeightPlacement, candidates
from relax_actor.engines.sglang.weights.sequence import Stream, UpdateRun, Way
from relax_actor.engines.sglang.weights.verify import Digests, topology
from relax_actor.ids import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class Updater:
    """Installs versions into one server.

    Args:
        client: of the server.
        facts: what it can do.
        settings: of the run.
        placement: where both sides are; None is a CPU.
        files: where versions may be found as files, the quickest first.
    """

    def __init__(
        self,
        client: Client,
        facts: Facts,
        settings: UpdateSettings | None = None,
        *,
        placement: WeightPlacement | None = None,
        files: Sequence[VersionFiles] = (),
    ) -> None:
        self._client, self._facts = client, facts
        self._settings = settings or UpdateSettings()
        self._placement = placement or WeightPlacement(ranks=facts.tp)
        self._files = files
        self._ways: dict[UpdateRoute, Way] = {}
        self._digests = self._opened_digests()
        self._is_torn = False

    @property
    def is_torn(self) -> bool:
        """Whether the last update failed after it had touched the server; then kill it."""
        return self._is_torn

    def update(
        self,
        version: PolicyVersion,
        tensors: "Iterable[tuple[str, Tensor]]",
        *,
        mode: UpdateMode,
        on_pause: Callable[[], None] | None = None,
    ) -> UpdateReport:
        """Install a version.

        Args:
            version: which one.
            tensors: Hugging Face names and tensors, all of them; each is copied before the next is asked
                for.
            mode: what becomes of the requests in the server.
            on_pause: called when everything is ready, right before the pause; for `abort`, it collects the
                requests.

        Raises:
            ValueError: the server cannot do `mode`, or there are no tensors; nothing was touched.
            RouteClosedError: no way is open; nothing was touched.
            SglangUpdateError: a step failed.
            DigestError: another replica has other weights under this version.
            Exception: whatever `tensors` raises before the server was touched, or `on_pause`.
        """
        started = time.perf_counter()
        self._is_torn = False
        self._steps(mode, UpdateRoute.IPC)  # a mode that is not possible is refused first
        calls = Calls(self._client, version)
        stream = Stream(tensors, self._settings.bucket_bytes, self._placement.device)
        way = self._opened_way(calls, stream.first)
        if on_pause is not None:
            on_pause()
        self._is_torn = True
        run = UpdateRun(
            calls,
            way=way,
            stream=stream,
            mode=mode,
            settings=self._settings,
            digests=self._digests,
        )
        run.through(self._steps(mode, way.route))
        self._is_torn = False
        return run.report(time.perf_counter() - started)

    def close(self) -> None:
        """Leave what was joined. Idempotent."""
        for way in self._ways.values():
            way.close()
        self._ways.clear()

    # -- parts ----------------------------------------------------------------------------------

    def _steps(self, mode: UpdateMode, route: UpdateRoute) -> tuple[Step, ...]:
        facts = self._facts
        verify = self._digests is not None
        return plan(
            mode,
            route,
            sessions=facts.weight_sessions,
            retract=facts.retract,
            verify=verify,
            on_gpu=facts.device != "cpu",
        )

    def _opened_digests(self) -> Digests | None:
        """Digests need a GPU: on a CPU, SGLang computes none."""
        settings, facts = self._settings, self._facts
        if not settings.verify or settings.digests is None or facts.device == "cpu":
            return None
        return Digests(settings.digests, topology(facts.version, self._placement.ranks, settings.model_path))

    def _opened_way(self, calls: Calls, first: Bucket) -> Way:
        """Return the best way that is open."""
        failures = []
        for route in candidates(self._placement, self._settings.routes, has_files=self._has_files):
            way = self._way(route)
            try:
                way.prepare(calls, first)
            except RouteClosedError as error:
                failures.append(error.reason)
            except SglangUpdateError:
                self._is_torn = True
                raise
            else:
                return way
        raise RouteClosedError("any route", "; ".join(failures) or "none leads to this server")

    @property
    def _has_files(self) -> bool:
        settings = self._settings
        return bool(self._files) and settings.model_path is not None and settings.scratch is not None

    def _way(self, route: UpdateRoute) -> Way:
        if route not in self._ways:
            self._ways[route] = self._made(route)
        return self._ways[route]

    def _made(self, route: UpdateRoute) -> Way:
        settings, deadlines = self._settings, self._settings.deadlines
        if route is UpdateRoute.IPC:
            return IpcWay(self._placement, deadlines)
        if route is UpdateRoute.GROUP:
            from relax_actor.engines.sglang.weights.group import GroupWay  # noqa: PLC0415 - seldom needed

            return GroupWay(self._placement, deadlines)
        assert settings.model_path is not None  # noqa: S101 - or the route is no candidate
        assert settings.scratch is not None  # noqa: S101 - likewise
        return DiskWay(self._files, settings.model_path, settings.scratch, deadlines)
