"""What to do about samples that another policy drew: importance weights and how far apart the two are.

Everything is over response tokens laid end to end, float32 [tokens], natural logarithms.
"""

import math

import torch
from torch import Tensor

from relax_actor.rl.apart import Mismatch

LOG_RATIO_LIMIT = 20.0
"""Beyond e^20 a ratio says only that the policies have nothing in common; float32 ends at e^88."""


def tis_weights(trainer_logprobs: Tensor, rollout_logprobs: Tensor, *, maximum: float) -> Tensor:
    """Return truncated importance weights min(trainer / rollout, maximum).

    The logarithm is cut before the exponential, so that no difference overflows.

    Args:
        trainer_logprobs: float32 [tokens], of the trainer's policy at the start of the step.
        rollout_logprobs: float32 [tokens], as sampled.
        maximum: where to cut; 0 turns the correction off.

    Returns:
        float32 [tokens] in (0, maximum], or ones; carries no gradient.

    Source:
        Ionides, Truncated importance sampling, 2008; for the gap between sampler and trainer:
        Yao et al., Your efficient RL framework secretly brings you off-policy RL training, 2025.
    """
    if maximum == 0:
        return torch.ones_like(rollout_logprobs)
    difference = trainer_logprobs.detach().float() - rollout_logprobs.float()
    return difference.clamp(max=math.log(maximum)).exp()


def bounded_log_ratio(logprobs: Tensor, base: Tensor) -> Tensor:
    """Return log(policy / base) within ±20; beyond it the gradient is 0.

    Args:
        logprobs: float32 [tokens].
        base: float32 [tokens].
    """
    return (logprobs - base).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) from samples of p: exp(x) - 1 - x for x = log q - log p.

    Args:
        log_ratio: float32 [tokens], log q - log p.

    Returns:
        float32 [tokens], never negative, in nats; constant above x = 20.

    Source:
        Schulman, Approximating KL divergence, 2020: the unbiased estimator of low variance.
    """
    bounded = log_ratio.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(bounded) - bounded


@torch.no_grad()
def mismatch(trainer_logprobs: Tensor, rollout_logprobs: Tensor) -> Mismatch:
    """Measure how far trainer and rollout disagree about the same tokens.

    Args:
        trainer_logprobs: float32 [tokens].
        rollout_logprobs: float32 [tokens], as sampled.

    Returns:
        Sums over the tokens; zeros where there are none.
    """
    difference = trainer_logprobs - rollout_logprobs
    if difference.numel() == 0:
        return Mismatch(abs_sum=0.0, k3_sum=0.0, max_ratio=0.0)
    return Mismatch(
        abs_sum=difference.abs().sum().item(),
        k3_sum=k3(difference).sum().item(),
        max_ratio=difference.max().clamp(max=LOG_RATIO_LIMIT).exp().item(),
        tokens=difference.numel(),
    )


def mismatch_by_version(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, versions: Tensor
) -> dict[int, Mismatch]:
    """Measure it for the tokens of each policy version alone.

    Args:
        trainer_logprobs: float32 [tokens].
        rollout_logprobs: float32 [tokens], as sampled.
        versions: int32 [tokens], the policy version that sampled each.

    Returns:
        By version, ascending.
    """
    return {
        version: mismatch(trainer_logprobs[versions == version], rollout_logprobs[versions == version])
        for version in sorted(set(versions.tolist()))
    }
