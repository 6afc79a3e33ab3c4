"""From logits to tokens: log-probs, top-k, top-p and the choice by inverse CDF. Pure.

Order of things: divide by the temperature, mask forbidden tokens, take log-probs (these are returned),
keep the top k, keep the top p of what is left, choose by token id order. The trainer computes log-probs
of logits / temperature as well, so both agree as long as nothing is forbidden.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from relax_actor.engines.base import SamplingParams
from relax_actor.engines.errors import LogitsError

Key = TypeVar("Key", bound=Hashable)

_CHUNK_NUMBERS = 1 << 19  # 2 MiB of float32: several passes over it stay in a core's cache
_CANDIDATES = 1024  # a full sort of a vocabulary costs more than the model's forward


def sample_tokens(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose one token a row.

    Args:
        logits: [n, vocabulary], any float dtype; -inf is impossible, +inf takes all the mass.
        params: n, one a row.
        uniforms: float64 [n] in [0, 1); rows at temperature 0 do not use theirs.

    Returns:
        int64 [n] token ids, and float32 [n] their natural log-probs of logits / temperature, after
        forbidden tokens are masked and before top-k and top-p. Temperature 0 takes the most probable
        token, the lowest id of equals, and reports log-probs of temperature 1.

    Raises:
        LogitsError: a row has a NaN, or no possible token.
    """
    rows = max(1, _CHUNK_NUMBERS // logits.shape[-1])
    chunks = [
        _sample_chunk(logits, params, uniforms, range(first, min(first + rows, len(params))))
        for first in range(0, len(params), rows)
    ]
    return torch.cat([tokens for tokens, _ in chunks]), torch.cat([logprobs for _, logprobs in chunks])


def token_logprobs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return natural log-probs of logits / temperature with forbidden tokens masked.

    Args:
        logits: [n, vocabulary], any float dtype.
        params: n, one a row.

    Returns:
        float32 [n, vocabulary].

    Raises:
        LogitsError: a row has a NaN, or no possible token.
    """
    temperatures = [p.temperature or 1.0 for p in params]
    scores = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    for forbidden, rows in _grouped([p.forbidden_token_ids for p in params]).items():
        if forbidden:
            scores[torch.tensor(rows)[:, None], torch.tensor(forbidden)] = -torch.inf
    logprobs = scores.log_softmax(-1)
    odd = logprobs.amax(-1).isnan().nonzero()[:, 0]  # amax is NaN where anything is
    if len(odd):
        logprobs[odd] = _logprobs_at_infinity(scores[odd], odd)
    return logprobs


def _sample_chunk(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor, rows: range
) -> tuple[Tensor, Tensor]:
    """Choose the tokens of some rows."""
    part = slice(rows.start, rows.stop)
    params = params[part]
    try:
        logprobs = token_logprobs(logits[part], params)
    except LogitsError as error:
        raise LogitsError([rows[row] for row in error.rows]) from None
    chosen = _inverse_cdf(_weights(logprobs, params), uniforms[part])
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    if bool(greedy.any()):
        chosen = torch.where(greedy, logprobs.argmax(-1), chosen)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def _logprobs_at_infinity(scores: Tensor, rows: Tensor) -> Tensor:
    """Share all the mass among the +inf tokens, the limit of ever larger logits."""
    limit = torch.where(scores == torch.inf, 0.0, -torch.inf).log_softmax(-1)
    bad = rows[scores.isnan().any(-1) | limit.isnan().any(-1)]
    if len(bad):
        raise LogitsError(bad.tolist())
    return limit


def _weights(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return float32 [n, vocabulary] to sample in proportion to; 0 is filtered out."""
    weights = logprobs.exp()
    for (top_k, top_p), rows in _grouped([(p.top_k, p.top_p) for p in params]).items():
        if top_k > 0 or top_p < 1:
            index = torch.tensor(rows, device=weights.device)
            weights[index] = _truncated(weights[index], top_k, top_p)
    return weights


def _truncated(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the smallest set of best tokens that has k tokens or the share p of the top k's mass."""
    result, decided = _truncated_among(_best(weights, _CANDIDATES), weights, top_k, top_p)
    rest = (~decided).nonzero()[:, 0]
    if len(rest):
        ranked = weights[rest].sort(dim=-1, descending=True, stable=True)
        result[rest], _ = _truncated_among((ranked.values, ranked.indices), weights[rest], top_k, top_p)
    return result


def _best(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best `count` weights and ids of each row, best first, the lower id first of equals."""
    ids = weights.topk(min(count, weights.shape[-1]), dim=-1, sorted=False).indices.sort(-1).values
    order = weights.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return order.values, ids.gather(-1, order.indices)


def _truncated_among(
    ranked: tuple[Tensor, Tensor], weights: Tensor, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """Filter, knowing only the best candidates; also tell which rows they sufficed for.

    They do when the worst token kept is better than the worst candidate: then no token outside is
    as good as one kept.
    """
    values, ids = ranked
    kept = values.clone()
    kept[:, top_k or values.shape[-1] :] = 0
    mass = kept.sum(-1, keepdim=True, dtype=torch.float64)
    if not top_k:
        mass = weights.sum(-1, keepdim=True, dtype=torch.float64)
    before = kept.cumsum(-1, dtype=torch.float64) - kept
    kept[:, 1:][before[:, 1:] >= top_p * mass] = 0  # the best token always stays
    worst = torch.where(kept > 0, kept, torch.inf).amin(-1)
    decided = (worst > values[:, -1]) | (values[:, -1] == 0)
    return torch.zeros_like(weights).scatter_(-1, ids, kept), decided


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return int64 [n], the first token whose cumulated weight exceeds the uniform's share of the total.

    The comparison is strict and the target is below the total, so a token of weight 0 is never chosen.
    """
    cdf = weights.cumsum(-1)  # summed in double, stored in single: a token's share is right to 2**-24
    total = cdf[:, -1:].double()
    below = torch.nextafter(cdf[:, -1:], torch.zeros_like(cdf[:, -1:]))
    target = torch.minimum((uniforms[:, None] * total).float(), below)
    return torch.searchsorted(cdf, target, right=True)[:, 0]


def _grouped(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Return the rows that share each key."""
    rows: dict[Key, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return rows
