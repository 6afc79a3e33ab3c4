"""Continuous batching over Hugging Face causal language models: the embedded engine, on a CPU or one GPU."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from relax_actor.engines.base import Completion, Lockstep, Request
from relax_actor.engines.batching import AloneBatching, Batching, TogetherBatching
from relax_actor.engines.decoder import Decoder
from relax_actor.engines.errors import EngineNotReadyError, require_idle
from relax_actor.engines.randomness import token_uniforms
from relax_actor.engines.running import RunningSample, admitted, check_token_ids
from relax_actor.engines.sampling import sample_tokens
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex
from relax_actor.protocol import FinishReason


class Network(Protocol):
    """What `BatchingEngine` needs of a model."""

    vocabulary: int
    context_tokens: int

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in place."""
        ...

    def weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Show weights by name."""
        ...

    def sleep(self) -> None:
        """Free the memory of the weights."""
        ...

    def wake(self) -> None:
        """Take memory for weights, all of which the next load has to bring."""
        ...


class BatchingEngine(Lockstep):
    """The `Engine` but for the network: versions, requests, sampling.

    Args:
        decoder: where weights go.
        batching: what makes logits with it.
        seed: the run's, the same on all replicas.
        slots: how many samples are decoded at once.
    """

    def __init__(self, decoder: Network, batching: Batching, *, seed: int, slots: int) -> None:
        self._decoder, self._batching = decoder, batching
        self._seed, self._slots = seed, slots
        self._version: PolicyVersion | None = None
        self._lowest_version = PolicyVersion(0)
        self._waiting: list[RunningSample] = []

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
        return len(self._samples())

    def install(self, version: PolicyVersion, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in place; requests in flight keep their tokens, keys and values and go on.

        A failure leaves mixed weights, so nothing is sampled until an install succeeds.

        Raises:
            KeyError: a name the model does not have.
            ValueError: a lower version, or a shape that does not fit.
        """
        if version < self._lowest_version:
            raise ValueError(f"policy version {version} is lower than {self._lowest_version}")
        self._version = None
        self._decoder.load(weights)
        self._batching.weights_changed()
        self._version = self._lowest_version = version

    def weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Show installed weights by name, without a copy.

        Raises:
            EngineNotReadyError: no whole version is installed.
            KeyError: a name the model does not have.
        """
        if self._version is None:
            raise EngineNotReadyError
        return self._decoder.weights(names)

    def invalidate(self) -> None:
        """Take the installed weights for torn, as after an install that failed."""
        self._version = None

    def sleep(self) -> bool:
        """Free weights and cache.

        Raises:
            ValueError: requests are in flight.
        """
        require_idle(self.in_flight)
        self._version = None
        self._batching.weights_changed()
        self._batching.drop_cache()
        self._decoder.sleep()
        return True

    def wake(self) -> None:
        """Take memory for the weights; caches grow by themselves."""
        self._decoder.wake()

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, all or none; they start at the next `step`.

        Raises:
            EngineNotReadyError: no version is installed.
            ValueError: more than `free_slots`.
            RequestError: one can never be sampled: a key in flight, an empty prompt or one that leaves
                no room for a token, a token id the model does not have.
        """
        if self._version is None:
            raise EngineNotReadyError
        for request in requests:
            check_token_ids(request, self._decoder.vocabulary)
        self._waiting += admitted(
            requests,
            free_slots=self.free_slots,
            taken={sample.request.key for sample in self._samples()},
            context_tokens=self._decoder.context_tokens,
        )

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample one token for every request in flight; return those that finished.

        Raises:
            EngineNotReadyError: the last install failed.
            LogitsError: the model's output is no distribution.
        """
        if self._version is None:
            raise EngineNotReadyError
        joining, self._waiting = self._waiting, []
        for samples, logits in self._batching.next_logits(joining):
            self._append_tokens(samples, logits, self._version)
        return self._finished()

    def lengths(self) -> dict[tuple[GroupId, SampleIndex], int]:
        """Return how many response tokens, the prefix included, every request in flight has."""
        return {sample.request.key: len(sample.tokens) for sample in self._samples()}

    def peek(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Return the tokens so far of requests that go on. Keys that are not in flight are passed over."""
        wanted = set(keys)
        samples = [sample for sample in self._samples() if sample.request.key in wanted]
        return [self._completion(sample, FinishReason.ABORT) for sample in samples]

    def abort(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Stop these requests; return their tokens so far. Keys that are not in flight are passed over."""
        wanted = set(keys)
        waiting = [sample for sample in self._waiting if sample.request.key in wanted]
        running = [sample for sample in self._batching.samples if sample.request.key in wanted]
        self._waiting = [sample for sample in self._waiting if sample.request.key not in wanted]
        aborted = [self._completion(sample, FinishReason.ABORT) for sample in waiting + running]
        self._remove(running)
        return aborted

    def _samples(self) -> list[RunningSample]:
        return [*self._batching.samples, *self._waiting]

    def _append_tokens(
        self, samples: Sequence[RunningSample], logits: Tensor, version: PolicyVersion
    ) -> None:
        uniforms = token_uniforms(
            self._seed,
            np.array([sample.request.group_id for sample in samples]),
            np.array([sample.request.sample_index for sample in samples]),
            np.array([len(sample.tokens) for sample in samples]),
        )
        params = [sample.request.params for sample in samples]
        tokens, logprobs = sample_tokens(logits, params, torch.from_numpy(uniforms).to(logits.device))
        for sample, token, logprob in zip(samples, tokens.tolist(), logprobs.tolist(), strict=True):
            sample.append(token, logprob, version)

    def _finished(self) -> list[Completion]:
        ended = [(sample, reason) for sample in self._batching.samples if (reason := sample.finish_reason)]
        finished = [self._completion(sample, reason) for sample, reason in ended]
        self._remove([sample for sample, _ in ended])
        return finished

    def _completion(self, sample: RunningSample, reason: FinishReason) -> Completion:
        return sample.completion(reason, self._batching.routes(sample))

    @torch.inference_mode()
    def _remove(self, samples: Sequence[RunningSample]) -> None:
        self._batching.remove(samples)


class TransformersEngine(BatchingEngine):
    """Samples from any decoder-only model with full attention; see `relax_actor.engines.base.Engine`.

    It starts with random weights and no version: nothing is sampled before the first `install`.

    Args:
        model_folder: a Hugging Face model folder; config.json is enough while `dummy_weights`.
        seed: the run's, the same on all replicas.
        slots: how many samples are decoded at once.
        context: tokens of prompt and response together; None is the model's own limit.
        dtype: what it computes in, `float32` or `bfloat16`.
        deterministic: compute every sample alone, so that its bits are the same beside any others.
        threads: torch's, of the whole process.
        device: a torch device.
        dummy_weights: start without reading the folder's weights.
        record_routes: say of each completion which experts its tokens went through.

    Raises:
        ValueError: the model has a kind of attention that is not supported at this context.
        UnsupportedRoutingError: `record_routes` of a model without experts, or of an unknown kind.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        seed: int,
        slots: int,
        dtype: str,
        context: int | None = None,
        deterministic: bool = False,
        threads: int = 1,
        device: str = "cpu",
        dummy_weights: bool = True,
        record_routes: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        decoder = Decoder(
            model_folder,
            context_tokens=context,
            dtype=dtype,
            device=device,
            dummy_weights=dummy_weights,
            record_routes=record_routes,
        )
        batching = AloneBatching(decoder) if deterministic else TogetherBatching(decoder, slots)
        super().__init__(decoder, batching, seed=seed, slots=slots)
