"""The requests at the server: sent, heard of, cut off, collected before an update and sent again after it.

A request is a sample's prompt with all it has so far, whoever sampled that. What comes back is handed over
by the I/O thread and looked at in the actor's own: only `_deliver` and `_ended` run elsewhere.
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.engines.base import Completion
from relax_actor.engines.errors import RequestError
from relax_actor.engines.running import RunningSample
from relax_actor.engines.sglang.answers import (
    Answer,
    Key,
    parse,
    policy_version,
    token_versions,
    unpack_routes,
)
from relax_actor.engines.sglang.errors import DeadlineError, EngineDownError, ServerError
from relax_actor.engines.sglang.requests import Flight, GenerationSettings, request_body
from relax_actor.engines.sglang.weights.borders import as_sampled
from relax_actor.ids import PolicyVersion
from relax_actor.protocol import FinishReason
from relax_actor.rl.routing import splice

ABORT_S = 30.0
"""How long requests that are cut off may take to come back."""

ASK_AGAIN_S = 0.2
"""A request that was on its way is unknown to the server when the others are cut off: it is asked again."""

PATIENCE = 3
"""How often a server may cut a request off without being asked to."""


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


@dataclass(kw_only=True, slots=True)
class PromptsRead:
    """Tokens of prompts and prefixes, of requests that have come to an end."""

    tokens: int = 0
    cached: int = 0  # that were in the server's cache


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
        self._spans, self._late_by_a_step = spans, late_by_a_step
        self._read = PromptsRead()
        self._arrived: SimpleQueue[tuple[Flight, Any]] = SimpleQueue()
        self._flights: dict[Key, Flight] = {}
        self._waiting: dict[Key, RunningSample] = {}
        self._finished: list[Completion] = []
        self._refused: list[RequestError] = []
        self._routes: dict[Key, npt.NDArray[np.int32]] = {}
        self._cut_off: dict[Key, int] = {}
        self.progress = 0  # answers and events that brought tokens

    @property
    def keys(self) -> Collection[Key]:
        """The samples that are in flight."""
        done = {completion.request.key: None for completion in self._finished}
        return dict.fromkeys((*self._flights, *self._waiting), None) | done

    def send(self, samples: Iterable[RunningSample], version: PolicyVersion) -> None:
        """Have samples sampled on.

        Args:
            samples: new ones, or such that wait.
            version: what is installed.
        """
        for sample in samples:
            key = sample.request.key
            self._waiting.pop(key, None)
            flight = Flight(
                sample=sample,
                rid=uuid.uuid4().hex,
                begun=len(sample.tokens),
                submitted=version,
                version=version,
            )
            self._flights[key] = flight
            self._begin(flight, request_body(flight, self._settings))

    def take(self, version: PolicyVersion) -> list[Completion]:
        """Look at what has come; return the finished samples, and send again what was cut off unasked.

        Raises:
            PartialRolloutFormatError, ServerGoneError, DeadlineError, ServerError, EngineDownError: the
                server can no longer be relied on.
        """
        self._look()
        self.send(list(self._waiting.values()), version)
        finished, self._finished = self._finished, []
        return finished

    def refused(self) -> list[RequestError]:
        """Return what the server would not sample, each once; it is in flight no more."""
        refused, self._refused = self._refused, []
        return refused

    def lengths(self) -> dict[Key, int]:
        """Return how many tokens every sample in flight is known to have."""
        self._look()
        done = {each.request.key: len(each.tokens) for each in self._finished}
        return done | {sample.request.key: len(sample.tokens) for sample in self._running()}

    def peek(self, keys: Iterable[Key]) -> list[Completion]:
        """Return what is known of samples that go on."""
        self._look()
        wanted = set(keys)
        done = [each for each in self._finished if each.request.key in wanted]
        running = [sample for sample in self._running() if sample.request.key in wanted]
        return [
            *(msgspec.structs.replace(each, finish_reason=FinishReason.ABORT) for each in done),
            *(self._completion(sample, FinishReason.ABORT) for sample in running),
        ]

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Stop samples; return their tokens so far, also of those that have just finished."""
        wanted = set(keys)
        self._cut(key for key in wanted if key in self._flights)
        done = [each for each in self._finished if each.request.key in wanted]
        self._finished = [each for each in self._finished if each.request.key not in wanted]
        for each in done:
            each.finish_reason = FinishReason.ABORT
        stopped = [self._waiting.pop(key) for key in list(self._waiting) if key in wanted]
        return done + [self._forget(sample, FinishReason.ABORT) for sample in stopped]

    def collect(self) -> int:
        """Cut off all requests, so that none is at the server; return how many have to go on.

        Their tokens stay, and `resume` sends them again.
        """
        self._cut(None)
        return len(self._waiting)

    def resume(self, version: PolicyVersion) -> int:
        """Send what waits; return how many tokens the server computes that it had computed before."""
        replayed = sum(sample.length for sample in self._waiting.values())
        self.send(list(self._waiting.values()), version)
        return replayed

    def prompts_read(self) -> PromptsRead:
        """Return what the server has read of prompts and prefixes since this was asked last."""
        read, self._read = self._read, PromptsRead()
        return read

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
            if self._flights.get(flight.sample.request.key) is flight:
                self._heard(flight, what)

    def _heard(self, flight: Flight, what: Any) -> None:
        key = flight.sample.request.key
        if isinstance(what, ServerError) and 400 <= what.status < 500 and what.status != 429:
            del self._flights[key]
            self._routes.pop(key, None)
            self._refused.append(RequestError(key, f"is refused by SGLang: {what.text[:300]}"))
        elif isinstance(what, BaseException):
            raise what
        else:
            self._add(flight, parse(what, key, is_event=self._settings.stream))

    def _add(self, flight: Flight, answer: Answer) -> None:
        sample, key = flight.sample, flight.sample.request.key
        self.progress += bool(answer.tokens)
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
            sample.append(token, logprob, flight.version)
        if answer.tokens and answer.finish is None and self._spans:
            # What came first after an update may be older than the update: it is taken for that.
            flight.version = policy_version(answer.weight_version, key)
        if answer.finish is not None:
            self._read.tokens += len(sample.request.prompt) + flight.begun
            self._read.cached += answer.cached_tokens
            self._set_versions(flight, answer)
            self._keep_routes(flight, answer)
            del self._flights[key]
            self._end(flight, answer)

    def _set_versions(self, flight: Flight, answer: Answer) -> None:
        """Record which weights sampled each token of this request: only its end says so exactly."""
        sample = flight.sample
        sampled = len(sample.tokens) - flight.begun
        if self._spans and sampled:
            versions = token_versions(answer.spans, sampled, sample.request.key)
            if self._late_by_a_step:
                versions = as_sampled(versions, flight.submitted)
            sample.versions[flight.begun :] = versions

    def _keep_routes(self, flight: Flight, answer: Answer) -> None:
        shape, key = self._settings.expert_shape, flight.sample.request.key
        if shape is None or not answer.routes:
            return
        old = self._routes.get(key, flight.sample.request.prefix.routed_experts)
        self._routes[key] = splice(old, unpack_routes(answer.routes, shape, key), key)

    def _end(self, flight: Flight, answer: Answer) -> None:
        sample, key = flight.sample, flight.sample.request.key
        # A stop token that is in no list of ours is the model's own.
        reason = sample.finish_reason or (FinishReason.STOP if answer.finish is FinishReason.STOP else None)
        if reason is not None:
            self._finished.append(self._forget(sample, reason))
            return
        self._waiting[key] = sample
        if not flight.is_unwanted:
            self._cut_off[key] = self._cut_off.get(key, 0) + 1
            if self._cut_off[key] > PATIENCE:
                raise EngineDownError(f"SGLang cuts a request off again and again: {answer.message}")

    def _forget(self, sample: RunningSample, reason: FinishReason) -> Completion:
        self._cut_off.pop(sample.request.key, None)
        completion = self._completion(sample, reason)
        self._routes.pop(sample.request.key, None)
        return completion

    def _completion(self, sample: RunningSample, reason: FinishReason) -> Completion:
        return sample.completion(reason, self._routes.get(sample.request.key))

    def _running(self) -> list[RunningSample]:
        return [*(flight.sample for flight in self._flights.values()), *self._waiting.values()]

    # -- cutting off --------------------------------------------------------------------------------

    def _cut(self, keys: Iterable[Key] | None) -> None:
        """Cut requests off and wait until they have come back; None is all."""
        flights = [self._flights[key] for key in (list(self._flights) if keys is None else keys)]
        end = time.monotonic() + ABORT_S
        while open_flights := [flight for flight in flights if self._is_open(flight)]:
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
        while any(map(self._is_open, flights)) and time.monotonic() < until:
            try:
                flight, what = self._arrived.get(timeout=ASK_AGAIN_S)
            except Empty:
                return
            if self._flights.get(flight.sample.request.key) is flight:
                self._heard(flight, what)

    def _is_open(self, flight: Flight) -> bool:
        return self._flights.get(flight.sample.request.key) is flight
