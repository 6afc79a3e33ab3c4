"""An engine without a model: the verified fake that tests, demos and fault drills run on.

It passes the same contract as the real ones. Its policy is a true distribution: the response's length is
uniform, so the stop token has a hazard that grows with the position, and all other tokens are equally likely.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from relax_actor.engines.base import Completion, Lockstep, Request
from relax_actor.engines.errors import EngineNotReadyError, RequestError, require_idle
from relax_actor.engines.randomness import token_uniforms
from relax_actor.engines.running import RunningSample, admitted
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex
from relax_actor.protocol import FinishReason
from transport.clock import Clock, SystemClock

if TYPE_CHECKING:
    from torch import Tensor

Script = Callable[[Request], Sequence[int] | None]
"""The tokens a request is answered with, or None for pseudo-random ones."""

_ENDLESS_TOKENS = 1 << 20  # the context of a model that has no limit


class EngineFaults(msgspec.Struct, frozen=True, kw_only=True):
    """What shall go wrong, for drills."""

    never_finish: frozenset[tuple[GroupId, SampleIndex]] = frozenset()
    """Keys that keep their slot and get no token, as in an engine that hangs."""
    raise_at_step: int = 0
    """The decode step, counted from 1, that raises; 0 is none."""


class InjectedFaultError(RuntimeError):
    """The fault that was asked for."""


class ScriptedEngine(Lockstep):
    """Answers every request with tokens that are a function of seed, prompt, group and sample.

    Args:
        seed: the run's, the same on all replicas.
        slots: how many samples are in flight at once.
        vocab: tokens it may emit, all equally likely; without the stop token.
        stop_token_id: what ends a sample when the request names it as a stop token.
        token_s: how long a decode step takes on `clock`; `step` returns nothing before that, and never
            sleeps.
        script: answers instead of pseudo-random ones; of log-prob 0. They end with the budget or at
            their end, which is made a stop token.
        faults: what shall go wrong.
        context: tokens of prompt and response together.
        shapes: names and shapes of the weights, to be checked by `install`; None takes any.
        clock: what `token_s` is measured on.
    """

    def __init__(
        self,
        *,
        seed: int,
        slots: int,
        vocab: Sequence[int],
        stop_token_id: int,
        token_s: float = 0.0,
        script: Script | None = None,
        faults: EngineFaults | None = None,
        context: int | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._seed, self._slots, self._stop = seed, slots, stop_token_id
        self._vocab = tuple(token for token in vocab if token != stop_token_id)
        self.nap_s = 0.001 if token_s else 0.0
        self._token_s, self._clock = token_s, clock or SystemClock()
        self._script, self._faults = script, faults or EngineFaults()
        self._context = context or _ENDLESS_TOKENS
        self._shapes = shapes
        self._version: PolicyVersion | None = None
        self._lowest_version = PolicyVersion(0)
        self._running: dict[tuple[GroupId, SampleIndex], RunningSample] = {}
        self._weights: dict[str, Tensor] = {}
        self._due_s = 0.0
        self.steps = 0  # decode steps done
        self.weights_digest = ""  # of the names and bytes installed last

    @property
    def version(self) -> PolicyVersion | None:
        """The installed policy version; None before the first install, and after one that failed."""
        return self._version

    @property
    def free_slots(self) -> int:
        """How many more requests fit now."""
        return self._slots - self.in_flight

    @property
    def in_flight(self) -> int:
        """How many requests have been submitted and not returned."""
        return len(self._running)

    def install(self, version: PolicyVersion, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy all weights, and keep their digest.

        Raises:
            KeyError: a name that is not in `shapes`.
            ValueError: a lower version, or another shape than in `shapes`.
        """
        if version < self._lowest_version:
            raise ValueError(f"policy version {version} is lower than {self._lowest_version}")
        self._version = None
        digest = xxhash.xxh3_128()
        for name, value in weights:
            self._check_weight(name, tuple(value.shape))
            digest.update(name.encode())
            digest.update(_raw_bytes(self._kept(name, value)))
        self.weights_digest = digest.hexdigest()
        self._version = self._lowest_version = version

    def sleep(self) -> bool:
        """Forget the weights.

        Raises:
            ValueError: requests are in flight.
        """
        require_idle(self.in_flight)
        self._version = None
        self._weights.clear()
        return False

    def wake(self) -> None:
        """Wait for an install."""

    def weights(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":
        """Show installed weights by name.

        Raises:
            EngineNotReadyError: no whole version is installed.
            KeyError: a name that was never installed.
        """
        if self._version is None:
            raise EngineNotReadyError
        return self._read(names)

    def invalidate(self) -> None:
        """Take the installed weights for torn, as after an install that failed."""
        self._version = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, all or none; they start at the next `step`.

        Raises:
            EngineNotReadyError: no version is installed.
            ValueError: more than `free_slots`.
            RequestError: a key in flight, an empty prompt or one that leaves no room for a token, or
                everything it could emit is forbidden.
        """
        if self._version is None:
            raise EngineNotReadyError
        for request in requests:
            if not set(self._vocab) - set(request.params.forbidden_token_ids):
                raise RequestError(request.key, "every token of the vocabulary is forbidden")
        samples = admitted(
            requests, free_slots=self.free_slots, taken=self._running, context_tokens=self._context
        )
        if not self._running:
            self._due_s = self._clock.monotonic() + self._token_s
        self._running.update({sample.request.key: sample for sample in samples})

    def step(self) -> list[Completion]:
        """Sample one token for every request in flight, if it is time; return those that finished.

        Raises:
            EngineNotReadyError: the last install failed.
            InjectedFaultError: it was asked for.
        """
        if self._version is None:
            raise EngineNotReadyError
        if not self._running or self._clock.monotonic() < self._due_s:
            return []
        self._due_s = self._clock.monotonic() + self._token_s
        self.steps += 1
        if self.steps == self._faults.raise_at_step:
            raise InjectedFaultError(f"decode step {self.steps} was to raise")
        for key, sample in self._running.items():
            if key not in self._faults.never_finish:
                sample.append(*self._next_token(sample), self._version)
        return self._finished()

    def lengths(self) -> dict[tuple[GroupId, SampleIndex], int]:
        """Return how many response tokens, the prefix included, every request in flight has."""
        return {key: len(sample.tokens) for key, sample in self._running.items()}

    def peek(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Return the tokens so far of requests that go on. Keys that are not in flight are passed over."""
        found = [key for key in dict.fromkeys(keys) if key in self._running]
        return [self._running[key].completion(FinishReason.ABORT) for key in found]

    def abort(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Stop these requests; return their tokens so far. Keys that are not in flight are passed over."""
        found = [key for key in dict.fromkeys(keys) if key in self._running]
        return [self._running.pop(key).completion(FinishReason.ABORT) for key in found]

    def _read(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":
        for name in names:
            if name not in self._weights:
                raise KeyError(f"the model has no weight `{name}`")
            yield name, self._weights[name]

    def _kept(self, name: str, value: "Tensor") -> "Tensor":
        """Copy a weight in place, where it is what it was."""
        own = self._weights.get(name)
        if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
            own = self._weights[name] = value.detach().cpu().clone()
            return own
        return own.copy_(value.detach())

    def _check_weight(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes is None:
            return
        if name not in self._shapes:
            raise KeyError(f"the model has no weight `{name}`")
        if shape != self._shapes[name]:
            raise ValueError(f"`{name}` is {list(shape)}, and the model needs {list(self._shapes[name])}")

    def _finished(self) -> list[Completion]:
        ended = [(key, reason) for key, sample in self._running.items() if (reason := sample.finish_reason)]
        return [self._running.pop(key).completion(reason) for key, reason in ended]

    def _next_token(self, sample: RunningSample) -> tuple[int, float]:
        """Return a token and its natural log-prob."""
        script = self._script(sample.request) if self._script else None
        if script is None:
            return self._drawn_token(sample)
        position = len(sample.tokens)
        return (script[position] if position < len(script) else self._stop), 0.0

    def _drawn_token(self, sample: RunningSample) -> tuple[int, float]:
        """Draw from: the stop token with the hazard of a uniform length, else any other token."""
        request, position = sample.request, len(sample.tokens)
        forbidden = set(request.params.forbidden_token_ids)
        tokens = [token for token in self._vocab if token not in forbidden]
        left = request.params.max_new_tokens - position
        hazard = 0.0 if self._stop in forbidden else 1 / (left + 1)
        u = self._uniform(request, position)
        if u < hazard:
            return self._stop, math.log(hazard)
        index = int((u - hazard) / (1 - hazard) * len(tokens))
        return tokens[min(index, len(tokens) - 1)], math.log((1 - hazard) / len(tokens))

    def _uniform(self, request: Request, position: int) -> float:
        """Return the token's number in [0, 1); at temperature 0 all samples of a prompt share theirs."""
        prompt = xxhash.xxh3_64_intdigest(np.array(request.prompt, dtype=np.int64).tobytes())
        key = (0, 0) if request.params.temperature == 0 else request.key
        return float(token_uniforms(self._seed ^ prompt, key[0], key[1], position)[0])


def _raw_bytes(value: "Tensor") -> bytes:
    """Return a tensor's bytes in C order, whatever its dtype."""
    import torch  # noqa: PLC0415 - whoever has a tensor has imported it; others are spared seconds

    flat = value.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data)
