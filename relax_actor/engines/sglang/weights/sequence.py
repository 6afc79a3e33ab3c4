"""An update as it happens: a way of weights, a stream of buckets, and the steps of `plan` one by one."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from relax_actor.engines.sglang.weights.calls import Calls
from relax_actor.engines.sglang.weights.payload import Bucket, buckets
from relax_actor.engines.sglang.weights.plan import CALLS, Step, UpdateMode, body
from relax_actor.engines.sglang.weights.records import Loaded, UpdateReport, UpdateSettings
from relax_actor.engines.sglang.weights.routes import UpdateRoute
from relax_actor.engines.sglang.weights.verify import Digests, digest_of
from relax_actor.faults import point

if TYPE_CHECKING:
    from torch import Tensor


class Way(Protocol):
    """One way of weights into a server."""

    @property
    def route(self) -> UpdateRoute:
        """Which one."""
        ...

    def prepare(self, calls: Calls, first: Bucket) -> None:
        """Do all that can be done while the server still decodes.

        Raises:
            RouteClosedError: the way cannot be taken; nothing was touched.
            SglangUpdateError: the server is in doubt all the same.
        """
        ...

    def load(self, calls: Calls, stream: Iterator[Bucket]) -> Loaded:
        """Bring all weights into the paused server."""
        ...

    def close(self) -> None:
        """Let go of what lasts longer than an update. Idempotent."""
        ...


class Stream:
    """Buckets, the first of which is full before anybody asks; handed out, they are not held.

    Args:
        tensors: names and weights.
        bucket_bytes: the largest bucket.
        device: where they are.

    Raises:
        ValueError: there are no weights.
        Exception: whatever `tensors` raises.
    """

    def __init__(self, tensors: "Iterable[tuple[str, Tensor]]", bucket_bytes: int, device: str) -> None:
        self._rest = buckets(tensors, bucket_bytes, device)
        self._first: Bucket | None = next(self._rest)

    @property
    def first(self) -> Bucket:
        """The first bucket, while it was not handed out."""
        assert self._first is not None  # noqa: S101 - asked for before anything is sent
        return self._first

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Bucket:
        first, self._first = self._first, None
        return next(self._rest) if first is None else first


class UpdateRun:
    """One update, from the pause on.

    Args:
        calls: of it.
        way: of the weights, prepared.
        stream: of buckets.
        mode: what becomes of the requests in the server.
        settings: of the run.
        digests: to compare with, where that is a step.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        way: Way,
        stream: Stream,
        mode: UpdateMode,
        settings: UpdateSettings,
        digests: Digests | None,
    ) -> None:
        self._calls, self._way, self._stream, self._mode = calls, way, stream, mode
        self._settings, self._digests = settings, digests
        self._loaded = Loaded(nbytes=0, buckets=0)
        self._paused_s = 0.0
        self._checksum_s: float | None = None

    def through(self, steps: Sequence[Step]) -> None:
        """Take all steps."""
        started = time.perf_counter()
        for step in steps:
            point(f"sglang_{step}")
            with self._calls.explained(step):
                self._take(step)
        self._paused_s = time.perf_counter() - started

    def report(self, seconds: float) -> UpdateReport:
        """Say what was done."""
        return UpdateReport(
            mode=self._mode,
            route=self._way.route,
            seconds=seconds,
            paused_s=self._paused_s,
            nbytes=self._loaded.nbytes,
            buckets=self._loaded.buckets,
            checksum_s=self._checksum_s,
        )

    def _take(self, step: Step) -> None:
        if step is Step.LOAD:
            self._loaded = self._way.load(self._calls, self._stream)
        elif step is Step.VERSION:
            self._check_version()
        elif step is Step.CHECKSUM:
            self._check_digest()
        else:
            self._calls.post(step, CALLS[step], body(step, self._mode), self._settings.deadlines.of())

    def _check_version(self) -> None:
        """Ask the server itself: an answer to a loading call may have been another call's."""
        expected = str(self._calls.version)
        info = self._calls.client.get("/model_info", deadline_s=self._settings.deadlines.of())
        found = info.get("weight_version")
        if found != expected:
            raise ValueError(f"the server has version {found!r}, not {expected!r}")

    def _check_digest(self) -> None:
        version = self._calls.version
        assert self._digests is not None  # noqa: S101 - or the step is left out
        assert version is not None  # noqa: S101 - an update always has one
        started = time.perf_counter()
        deadline_s = self._settings.deadlines.of(self._loaded.nbytes)
        answer = self._calls.client.post("/weights_checker", {"action": "checksum"}, deadline_s=deadline_s)
        self._digests.agree(version, digest_of(answer))
        self._checksum_s = time.perf_counter() - started
