"""The policy loss over response tokens laid end to end: no padding, so no mask can be wrong.

The loss of a step is a weighted sum over its tokens. The weights are known before the first forward
pass, so the micro-batches of a step add up to the same gradient however the step is split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from relax_actor.rl.offpolicy import bounded_log_ratio, k3, tis_weights


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """What the loss reads, float32 [tokens] each; only `logprobs` carries a gradient."""

    logprobs: Tensor  # of the policy being trained
    start_logprobs: Tensor  # of the trainer's policy at the start of the step
    rollout_logprobs: Tensor  # as sampled
    advantages: Tensor  # of the token's sample
    weights: Tensor  # from `token_weights`
    reference_logprobs: Tensor | None = None  # of the frozen reference; None without a KL term
    kl_weights: Tensor | None = None  # `weights`, or 0 where the KL term must not act


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The loss and what it is made of."""

    loss: Tensor  # float32 [], with gradient
    clipped_tokens: int  # tokens whose gradient the clip took away
    kl_sum: float  # k3 estimate of KL(policy || reference) over all tokens, in nats


def token_weights(lengths: Tensor, *, aggregation: str, total_tokens: int, total_sequences: int) -> Tensor:
    """Return what each token counts in the loss of its update.

    Args:
        lengths: int64 [sequences], response tokens of the sequences at hand, none of them 0.
        aggregation: `token_mean`: every token of the update alike; `sequence_mean`: every
            sequence alike, its tokens sharing.
        total_tokens: response tokens of the whole update.
        total_sequences: sequences of the whole update.

    Returns:
        float32 [tokens]; over a whole update they sum to 1.

    Source:
        token_mean: DAPO, arXiv:2503.14476, section 3.3. sequence_mean: GRPO, arXiv:2402.03300.
    """
    if aggregation == "token_mean":
        each = torch.full(lengths.shape, 1.0 / total_tokens, device=lengths.device)
    else:
        each = 1.0 / (lengths.float() * total_sequences)
    return each.repeat_interleave(lengths)


def clipped_loss(
    logprobs: Tensor, base_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate loss of each token.

    Args:
        logprobs: float32 [tokens], with gradient.
        base_logprobs: float32 [tokens], what the ratio divides by.
        advantages: float32 [tokens].
        clip_low: the ratio gains nothing below 1 - clip_low.
        clip_high: the ratio gains nothing above 1 + clip_high.

    Returns:
        float32 [tokens], -min(ratio * advantage, clipped ratio * advantage), and bool [tokens],
        where the clip took the gradient away.

    Source:
        PPO, arXiv:1707.06347, equation 7; two bounds: DAPO, arXiv:2503.14476, section 3.1.
    """
    ratio = bounded_log_ratio(logprobs, base_logprobs).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = clipped * advantages < ratio * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages), is_clipped


def policy_loss(
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
    tis_max: float,
    kl_coef: float,
    ratio_base: str,
) -> LossTerms:
    """Return the loss of some tokens of an update.

    Each token adds weight * (importance weight * clipped loss) + KL weight * kl_coef * k3.

    Args:
        tokens: what the loss reads.
        clip_low: see `clipped_loss`.
        clip_high: see `clipped_loss`.
        tis_max: see `tis_weights`; with `ratio_base` "rollout" the ratio corrects already and
            no importance weight is applied.
        kl_coef: 0 needs no reference.
        ratio_base: `trainer` divides by `start_logprobs`, `rollout` by `rollout_logprobs`.

    Source:
        The KL term inside the loss, estimated by k3: GRPO, arXiv:2402.03300, equation 4.
    """
    base = tokens.start_logprobs if ratio_base == "trainer" else tokens.rollout_logprobs
    surrogate, is_clipped = clipped_loss(
        tokens.logprobs, base, tokens.advantages, clip_low=clip_low, clip_high=clip_high
    )
    importance = tis_weights(base, tokens.rollout_logprobs, maximum=tis_max)
    loss = (tokens.weights * importance * surrogate).sum()
    kl, kl_sum = _kl_term(tokens)
    return LossTerms(
        loss=loss + kl_coef * kl if kl_coef else loss,
        clipped_tokens=int(is_clipped.sum().item()),
        kl_sum=kl_sum,
    )


def _kl_term(tokens: LossTokens) -> tuple[Tensor, float]:
    """Return the weighted KL with its gradient, and the plain sum; zeros without a reference."""
    if tokens.reference_logprobs is None:
        return torch.zeros(()), 0.0
    kl = k3(tokens.reference_logprobs - tokens.logprobs)
    weights = tokens.weights if tokens.kl_weights is None else tokens.kl_weights
    return (weights * kl).sum(), kl.detach().sum().item()
