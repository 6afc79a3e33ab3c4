"""A request to SGLang: what it is made of, and what is known of it while it is at the server."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from relax_actor.engines.randomness import sample_seed
from relax_actor.engines.running import RunningSample
from relax_actor.ids import PolicyVersion

BIAS = -1e9
"""What the logit of a token that must not be sampled is lowered by."""


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are made."""

    seed: int
    deterministic: bool = False  # whether the server samples by a request's own seed
    stream: bool = False  # whether requests are heard of before their end
    expert_shape: tuple[int, int] | None = None  # layers and experts a token, where they are recorded
    deadline_s: float = 3600.0  # of a request; whether the server lives is asked much sooner


@dataclass(kw_only=True, slots=True, eq=False)
class Flight:
    """A request at the server."""

    sample: RunningSample
    rid: str
    begun: int  # how many tokens the sample had
    submitted: PolicyVersion  # what was installed when it was sent
    version: PolicyVersion  # of its newest token, as far as is known
    future: "Future[Any]" = field(default_factory=Future)
    is_unwanted: bool = False  # whether it was asked to be cut off
    is_over: bool = False  # whether it has a stop string that the server has not seen


def request_body(flight: Flight, settings: GenerationSettings) -> dict[str, Any]:
    """Return the body of a request to `/generate`: the sample's prompt with all tokens that it has."""
    sample = flight.sample
    body: dict[str, Any] = {
        "input_ids": list(sample.text),
        "rid": flight.rid,
        "sampling_params": _sampling(sample, settings),
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": settings.stream,
        "extra_key": str(flight.submitted),  # what older weights have cached is never matched
    }
    if settings.expert_shape:
        body["return_routed_experts"] = True
    return body


def _sampling(sample: RunningSample, settings: GenerationSettings) -> dict[str, Any]:
    params, request = sample.request.params, sample.request
    sampling: dict[str, Any] = {
        "max_new_tokens": sample.budget_tokens - len(sample.tokens),
        "temperature": params.temperature,
        "top_p": max(params.top_p, 1e-6),  # which keeps the likeliest token, as 0 does for us
        "top_k": params.top_k or -1,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": not params.stop_token_ids,  # it would ignore those, too
    }
    if params.stop_strings is not None:
        sampling |= {"stop": list(params.stop_strings.strings), "no_stop_trim": True}
    if params.forbidden_token_ids:
        sampling["logit_bias"] = {str(token): BIAS for token in params.forbidden_token_ids}
    if settings.deterministic:
        sampling["sampling_seed"] = sample_seed(settings.seed, request.group_id, request.sample_index)
    return sampling
