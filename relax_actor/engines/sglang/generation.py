"""The requests at the server: sent, heard of, cut off, collected before an update and sent again after it.

A request is a sample's prompt with all it has so far, whoever sampled that. What comes back is handed over
by the I/O thread and looked at in the actor's own: only `_deliver` and `_ended` run elsewhere.
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from relax_actor.engines.base import Completion
from relax_actor.engines.errors import RequestError
from relax_actor.engines.running import RunningSample
from relax_actor.engines.sglang.answers import Key
from relax_actor.engines.sglang.errors import DeadlineError
from relax_actor.engines.sglang.requests import Flight, GenerationSettings, request_body
from relax_actor.engines.sglang.samples import PromptsRead, Samples
from relax_actor.ids import PolicyVersion

ABORT_S = 30.0
"""How long requests that are cut off may take to come back."""

ASK_AGAIN_S = 0.2
"""A request that was on its way is unknown to the server when the others are cut off: it is asked again."""


class Calls(Protocol):
    """What of a client is needed."""

    def post(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """Post and wait."""
        ...

    def start(self, path: str, body: Any = None, *, deadline_s: float) -> "Future[Any]":
        """Post."""
        ...

    def stream(
        self, path: str, body: Any, *, deadline_s: float, on_event: Callable[[Any], None]
    ) -> "Future[None]":
        """Post, and hear of every event."""
        ...


class Generation:
    """All samples of an engine, at the server or waiting for it.

    Args:
        client: of the server.
        settings: how requests are made.
        spans: whether the server says which weights sampled which token.
        late_by_a_step: whether it counts the token that is under way at an update as the newer weights'.
        on_ready: called in the I/O thread when there is something to look at.
    """

    def __init__(
        self,
        client: Calls,
        settings: GenerationSettings,
        *,
        spans: bool,
        late_by_a_step: bool = True,
        on_ready: Callable[[], None],
    ) -> None:
        self._client, self._settings, self._on_ready = client, settings, on_ready
        self._samples = Samples(settings, spans=spans, late_by_a_step=late_by_a_step)
        self._arrived: SimpleQueue[tuple[Flight, Any]] = SimpleQueue()

    @property
    def progress(self) -> int:
        """Answers and events that brought tokens."""
        return self._samples.progress

    @property
    def keys(self) -> Collection[Key]:
        """The samples that are in flight."""
        return self._samples.keys

    def send(self, samples: Iterable[RunningSample], version: PolicyVersion) -> None:
        """Have samples sampled on.

        Args:
            samples: new ones, or such that wait.
            version: what is installed.
        """
        for sample in samples:
            flight = Flight(
                sample=sample,
                rid=uuid.uuid4().hex,
                begun=len(sample.tokens),
                submitted=version,
                version=version,
            )
            self._samples.sent(flight)
            self._begin(flight, request_body(flight, self._settings))

    def take(self, version: PolicyVersion) -> list[Completion]:
        """Look at what has come; return the finished samples, and send again what was cut off unasked.

        Raises:
            PartialRolloutFormatError, ServerGoneError, DeadlineError, ServerError, EngineDownError: the
                server can no longer be relied on.
        """
        self._look()
        for rid in self._samples.take_surplus():
            self._client.start("/abort_request", {"rid": rid}, deadline_s=ABORT_S)
        self.send(list(self._samples.waiting.values()), version)
        return self._samples.take_finished()

    def refused(self) -> list[RequestError]:
        """Return what the server would not sample, each once; it is in flight no more."""
        return self._samples.take_refused()

    def lengths(self) -> dict[Key, int]:
        """Return how many tokens every sample in flight is known to have."""
        self._look()
        return self._samples.lengths()

    def peek(self, keys: Iterable[Key]) -> list[Completion]:
        """Return what is known of samples that go on."""
        self._look()
        return self._samples.peek(set(keys))

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Stop samples; return their tokens so far, also of those that have just finished."""
        wanted = set(keys)
        self._cut(key for key in wanted if key in self._samples.flights)
        return self._samples.take_back(wanted)

    def collect(self) -> int:
        """Cut off all requests, so that none is at the server; return how many have to go on.

        Their tokens stay, and `resume` sends them again.
        """
        self._cut(None)
        return len(self._samples.waiting)

    def resume(self, version: PolicyVersion) -> int:
        """Send what waits; return how many tokens the server computes that it had computed before."""
        replayed = sum(sample.length for sample in self._samples.waiting.values())
        self.send(list(self._samples.waiting.values()), version)
        return replayed

    def prompts_read(self) -> PromptsRead:
        """Return what the server has read of prompts and prefixes since this was asked last."""
        return self._samples.take_read()

    # -- sending ----------------------------------------------------------------------------------

    def _begin(self, flight: Flight, body: dict[str, Any]) -> None:
        deadline_s = self._settings.deadline_s
        if self._settings.stream:
            flight.future = self._client.stream(
                "/generate", body, deadline_s=deadline_s, on_event=lambda event: self._deliver(flight, event)
            )
        else:
            flight.future = self._client.start("/generate", body, deadline_s=deadline_s)
        flight.future.add_done_callback(lambda future: self._ended(flight, future))

    # -- the I/O thread -----------------------------------------------------------------------------

    def _deliver(self, flight: Flight, event: Any) -> None:
        self._arrived.put((flight, event))
        self._on_ready()

    def _ended(self, flight: Flight, future: "Future[Any]") -> None:
        error = future.exception()
        if error is not None:
            self._deliver(flight, error)
        elif not self._settings.stream:
            self._deliver(flight, future.result())

    # -- hearing ------------------------------------------------------------------------------------

    def _look(self) -> None:
        while True:
            try:
                flight, what = self._arrived.get_nowait()
            except Empty:
                return
            self._samples.heard(flight, what)

    # -- cutting off --------------------------------------------------------------------------------

    def _cut(self, keys: Iterable[Key] | None) -> None:
        """Cut requests off and wait until they have come back; None is all."""
        known = self._samples.flights
        flights = [known[key] for key in (known if keys is None else keys)]
        end = time.monotonic() + ABORT_S
        while open_flights := [flight for flight in flights if self._samples.is_open(flight)]:
            if time.monotonic() > end:
                raise DeadlineError("/abort_request", ABORT_S)
            self._ask_to_cut(open_flights, is_all=keys is None)
            self._await(open_flights)

    def _ask_to_cut(self, flights: list[Flight], *, is_all: bool) -> None:
        for flight in flights:
            flight.is_unwanted = True
        bodies: list[dict[str, Any]] = (
            [{"abort_all": True}] if is_all else [{"rid": flight.rid} for flight in flights]
        )
        asked = [self._client.start("/abort_request", body, deadline_s=ABORT_S) for body in bodies]
        for each in asked:
            each.result()

    def _await(self, flights: list[Flight]) -> None:
        until = time.monotonic() + ASK_AGAIN_S
        while any(map(self._samples.is_open, flights)) and time.monotonic() < until:
            try:
                flight, what = self._arrived.get(timeout=ASK_AGAIN_S)
            except Empty:
                return
            self._samples.heard(flight, what)
