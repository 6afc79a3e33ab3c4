"""What the server's answers make of the samples of an engine: tokens, versions, ends, refusals."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

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
from relax_actor.engines.sglang.errors import EngineDownError, ServerError
from relax_actor.engines.sglang.requests import Flight, GenerationSettings
from relax_actor.engines.sglang.weights.borders import as_sampled
from relax_actor.protocol import FinishReason
from relax_actor.rl.routing import splice

PATIENCE = 3
"""How often a server may cut a request off without being asked to."""


@dataclass(kw_only=True, slots=True)
class PromptsRead:
    """Tokens of prompts and prefixes, of requests that have come to an end."""

    tokens: int = 0
    cached: int = 0  # that were in the server's cache


class Samples:
    """The samples that an engine has been given, until it hands them back.

    Args:
        settings: how requests are made.
        spans: whether the server says which weights sampled which token.
        late_by_a_step: whether it counts the token that is under way at an update as the newer weights'.

    Attributes:
        flights: the requests at the server.
        waiting: samples that are to be sent again.
        progress: answers and events that brought tokens.
    """

    def __init__(self, settings: GenerationSettings, *, spans: bool, late_by_a_step: bool) -> None:
        self._settings, self._spans, self._late_by_a_step = settings, spans, late_by_a_step
        self.flights: dict[Key, Flight] = {}
        self.waiting: dict[Key, RunningSample] = {}
        self.progress = 0
        self._finished: list[Completion] = []
        self._surplus: list[str] = []
        self._refused: list[RequestError] = []
        self._read = PromptsRead()
        self._routes: dict[Key, npt.NDArray[np.int32]] = {}
        self._cut_off: dict[Key, int] = {}

    @property
    def keys(self) -> Collection[Key]:
        """Those nobody has been given yet."""
        return dict.fromkeys([*self.flights, *self.waiting, *(each.request.key for each in self._finished)])

    def sent(self, flight: Flight) -> None:
        """Take it that a sample is at the server."""
        key = flight.sample.request.key
        self.waiting.pop(key, None)
        self.flights[key] = flight

    def heard(self, flight: Flight, what: Any) -> None:
        """Take what came back for a request; nothing where another request is under way for its sample.

        Raises:
            PartialRolloutFormatError, ServerGoneError, DeadlineError, ServerError, EngineDownError: the
                server can no longer be relied on.
        """
        if not self.is_open(flight):
            return
        key = flight.sample.request.key
        if isinstance(what, ServerError) and 400 <= what.status < 500 and what.status != 429:
            del self.flights[key]
            self._routes.pop(key, None)
            self._refused.append(RequestError(key, f"is refused by SGLang: {what.text[:300]}"))
        elif isinstance(what, BaseException):
            raise what
        else:
            self._add(flight, parse(what, key, is_event=self._settings.stream))

    def is_open(self, flight: Flight) -> bool:
        """Return whether a request is its sample's, and has not come to an end."""
        return self.flights.get(flight.sample.request.key) is flight

    def take_finished(self) -> list[Completion]:
        """Return the samples that have finished, each once."""
        finished, self._finished = self._finished, []
        return finished

    def take_refused(self) -> list[RequestError]:
        """Return what the server would not sample, each once."""
        refused, self._refused = self._refused, []
        return refused

    def take_surplus(self) -> list[str]:
        """Return the rids of requests that go on after a stop string, each once."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def take_read(self) -> PromptsRead:
        """Return what was read of prompts since this was asked last."""
        read, self._read = self._read, PromptsRead()
        return read

    def take_back(self, keys: Collection[Key]) -> list[Completion]:
        """Return samples that are not at the server, finished or given up; they are forgotten."""
        done = [each for each in self._finished if each.request.key in keys]
        self._finished = [each for each in self._finished if each.request.key not in keys]
        stopped = [self.waiting.pop(key) for key in list(self.waiting) if key in keys]
        return done + [self._over(sample, FinishReason.ABORT) for sample in stopped]

    def lengths(self) -> dict[Key, int]:
        """Return how many tokens every sample is known to have."""
        done = {each.request.key: len(each.tokens) for each in self._finished}
        return done | {sample.request.key: len(sample.tokens) for sample in self._running()}

    def peek(self, keys: set[Key]) -> list[Completion]:
        """Return what is known of samples that go on."""
        done = [each for each in self._finished if each.request.key in keys]
        over = {key for key, flight in self.flights.items() if flight.is_over}  # cut when they come back
        running = [sample for sample in self._running() if sample.request.key in keys - over]
        return [
            *(msgspec.structs.replace(each, finish_reason=FinishReason.ABORT) for each in done),
            *(self._completion(sample, FinishReason.ABORT) for sample in running),
        ]

    def _running(self) -> list[RunningSample]:
        return [*(flight.sample for flight in self.flights.values()), *self.waiting.values()]

    def _add(self, flight: Flight, answer: Answer) -> None:
        sample, key = flight.sample, flight.sample.request.key
        self.progress += bool(answer.tokens)
        known = len(sample.tokens)
        sample.extend(answer.tokens, answer.logprobs, flight.version)
        if answer.tokens and answer.finish is None and self._spans:
            # What came first after an update may be older than the update: it is taken for that.
            flight.version = policy_version(answer.weight_version, key)
        if answer.finish is not None:
            self._read.tokens += len(sample.request.prompt) + flight.begun
            self._read.cached += answer.cached_tokens
            self._set_versions(flight, answer)
            self._keep_routes(flight, answer)
            self._cut(flight)
            del self.flights[key]
            self._end(flight, answer)
        elif not flight.is_over and sample.stop_string_end(known) is not None:
            flight.is_over = flight.is_unwanted = True
            self._surplus.append(flight.rid)

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

    def _cut(self, flight: Flight) -> None:
        """Forget what follows a stop string: the server does not look for one that begins in a prefix."""
        sample, key = flight.sample, flight.sample.request.key
        end = sample.stop_string_end(flight.begun)
        if end is not None:
            sample.cut(end)
            if key in self._routes:
                self._routes[key] = self._routes[key][: sample.length - 1]

    def _end(self, flight: Flight, answer: Answer) -> None:
        sample, key = flight.sample, flight.sample.request.key
        # A stop token that is in no list of ours is the model's own.
        reason = sample.finish_reason or (FinishReason.STOP if answer.finish is FinishReason.STOP else None)
        if reason is not None:
            self._finished.append(self._over(sample, reason))
            return
        self.waiting[key] = sample
        if not flight.is_unwanted:
            self._cut_off[key] = self._cut_off.get(key, 0) + 1
            if self._cut_off[key] > PATIENCE:
                raise EngineDownError(f"SGLang cuts a request off again and again: {answer.message}")

    def _over(self, sample: RunningSample, reason: FinishReason) -> Completion:
        self._cut_off.pop(sample.request.key, None)
        completion = self._completion(sample, reason)
        self._routes.pop(sample.request.key, None)
        return completion

    def _completion(self, sample: RunningSample, reason: FinishReason) -> Completion:
        return sample.completion(reason, self._routes.get(sample.request.key))
