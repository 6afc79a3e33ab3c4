"""Samples that are being sampled: what both engines check before, record during and return after."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from relax_actor.engines.base import Completion, Request
from relax_actor.engines.errors import RequestError
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex
from relax_actor.protocol import FinishReason
from relax_actor.rl.routing import check_length, splice


@dataclass(kw_only=True, slots=True, eq=False)
class RunningSample:
    """A sample and its tokens so far."""

    request: Request
    budget_tokens: int  # max_new_tokens, clipped to the context; the prefix counts
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, budget_tokens: int) -> "RunningSample":
        """Return a sample that goes on after its request's prefix.

        Raises:
            RequestError: nothing may follow the prefix, or it is not one log-prob and version a token.
            RoutedExpertsError: the prefix has routes, and they are not those of as many tokens.
        """
        prefix = request.prefix
        sample = cls(
            request=request,
            budget_tokens=budget_tokens,
            tokens=list(prefix.tokens),
            logprobs=list(prefix.logprobs),
            versions=list(prefix.versions),
        )
        if not len(prefix.tokens) == len(prefix.logprobs) == len(prefix.versions):
            lengths = f"{len(prefix.tokens)} tokens, {len(prefix.logprobs)} log-probs"
            raise RequestError(request.key, f"has a prefix of {lengths}, {len(prefix.versions)} versions")
        routes = prefix.routed_experts
        if routes is not None:
            check_length(routes, len(request.prompt), len(prefix.tokens), request.key)
        if sample.finish_reason is not None:
            raise RequestError(request.key, f"its prefix has come to its end: {sample.finish_reason}")
        return sample

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and the response so far."""
        return (*self.request.prompt, *self.tokens)

    @property
    def length(self) -> int:
        """How many tokens prompt and response have."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has no further tokens; None while it goes on."""
        if self.tokens and self.tokens[-1] in self.request.params.stop_token_ids:
            return FinishReason.STOP
        if self.stop_string_end(len(self.tokens) - 1) is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.budget_tokens else None

    def append(self, token: int, logprob: float, version: PolicyVersion) -> None:
        """Record the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], version: PolicyVersion) -> None:
        """Record the next tokens, with as many log-probs, all of one version."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def stop_string_end(self, begin: int) -> int | None:
        """Return how many tokens there are up to the end of a stop string; see `StopStrings.end`."""
        strings = self.request.params.stop_strings
        return None if strings is None else strings.end(self.tokens, begin)

    def cut(self, length: int) -> None:
        """Forget all but so many tokens."""
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]

    def completion(self, reason: FinishReason, routes: npt.NDArray[np.int32] | None = None) -> Completion:
        """Return what is handed to the rollout.

        Args:
            reason: why it has no further tokens.
            routes: the experts of all its tokens but the last, as this engine computed them; those of the
                prefix stay as they were. None where the engine records none, or has not begun.
        """
        kept = self.request.prefix.routed_experts
        return Completion(
            request=self.request,
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            routed_experts=kept if routes is None else splice(kept, routes, self.request.key),
        )


def admitted(
    requests: Sequence[Request],
    *,
    free_slots: int,
    taken: Collection[tuple[GroupId, SampleIndex]],
    context_tokens: int,
) -> list[RunningSample]:
    """Check requests, all or none, and give each its budget of tokens.

    Args:
        requests: what is to be sampled.
        free_slots: how many may be.
        taken: keys already in flight.
        context_tokens: how long prompt and response may be together.

    Raises:
        ValueError: more requests than free slots.
        RequestError: a key twice, an empty prompt, no token wanted, no room for one, or a prefix that
            has come to its end.
    """
    if len(requests) > free_slots:
        raise ValueError(f"{len(requests)} requests do not fit into {free_slots} free slots")
    seen = set(taken)
    samples = []
    for request in requests:
        if request.key in seen:
            raise RequestError(request.key, "is in flight already")
        seen.add(request.key)
        samples.append(RunningSample.of(request, _budget(request, context_tokens)))
    return samples


def check_token_ids(request: Request, vocabulary: int) -> None:
    """Refuse ids that would crash the embedding, or mask another token than was meant.

    Args:
        request: whose prompt, prefix and forbidden tokens are looked at.
        vocabulary: how many tokens the model has.

    Raises:
        RequestError: an id the model does not have.
    """
    for what, ids in (
        ("prompt", request.prompt),
        ("prefix", request.prefix.tokens),
        ("forbidden", request.params.forbidden_token_ids),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            fact = f"{what} token ids span {min(ids)} to {max(ids)}"
            raise RequestError(request.key, f"{fact}, and the model has {vocabulary}")


def _budget(request: Request, context_tokens: int) -> int:
    """Clip max_new_tokens to the context."""
    prompt, wanted = len(request.prompt), request.params.max_new_tokens
    if prompt == 0:
        raise RequestError(request.key, "the prompt is empty")
    if wanted < 1:
        raise RequestError(request.key, f"max_new_tokens is {wanted}, and a sample has at least one token")
    if prompt >= context_tokens:
        raise RequestError(
            request.key,
            f"a prompt of {prompt} tokens leaves no room in a context of {context_tokens} tokens",
        )
    return min(wanted, context_tokens - prompt)
