"""How much better a sample is than the other samples of its prompt.

Statistics are float64 and over the samples that have a reward: a group may have lost some. Where
all rewards of a group are equal there is nothing to learn, and its advantages are exactly 0,
whatever rounding would make of a mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from relax_actor.errors import RelaxError

Estimator = Callable[[Tensor], Tensor]
"""Rewards of one group, float64 [samples], at least two of them different, to their advantages."""

LARGEST_REWARD = 1e30
"""Advantages become float32, and the square of a reward must stay finite in float64."""

_STD_FLOOR = 1e-6


class UnusableRewardError(RelaxError, ValueError):
    """A reward that no statistics can be made of; it must be rejected before it comes here.

    Args:
        group: whose reward it is.
        sample: which one of the rewards given, from 0.
        reward: the offender.
    """

    def __init__(self, group: int, sample: int, reward: float) -> None:
        self.group, self.sample, self.reward = group, sample, reward
        super().__init__(
            f"reward {sample} of group {group} is {reward}; rewards are finite and within ±{LARGEST_REWARD:g}"
        )


def group_advantages(groups: Mapping[int, Sequence[float]], estimator: str) -> dict[int, list[float]]:
    """Estimate the advantage of every sample, group by group.

    Args:
        groups: raw rewards by group id; groups may differ in size. A group of one has no signal.
        estimator: a name of `ESTIMATORS`.

    Returns:
        Advantages by group id, in the order given; exactly 0 for a group without signal.

    Raises:
        KeyError: no such estimator.
        UnusableRewardError: a reward is NaN, infinite or absurdly large; names the group.
    """
    estimate = ESTIMATORS[estimator]
    return {group: _advantages(group, rewards, estimate) for group, rewards in groups.items()}


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether a group can teach anything: whether two of its rewards differ."""
    return any(reward != rewards[0] for reward in rewards)


def grpo(rewards: Tensor) -> Tensor:
    """Subtract the group's mean and divide by its standard deviation.

    Args:
        rewards: float64 [samples], at least 2.

    Returns:
        float64 [samples] in standard deviations; the deviation is the sample's (ddof 1), plus 1e-6.

    Source:
        DeepSeekMath, arXiv:2402.03300, section 4.1.2; ddof as in its common implementations.
    """
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + _STD_FLOOR)


def dr_grpo(rewards: Tensor) -> Tensor:
    """Subtract the group's mean, and no more: easy and hard prompts then weigh alike.

    Args:
        rewards: float64 [samples].

    Returns:
        float64 [samples] in reward units; sums to 0.

    Source:
        Understanding R1-Zero-like training, arXiv:2503.20783, section 3.
    """
    return rewards - rewards.mean()


def rloo(rewards: Tensor) -> Tensor:
    """Subtract from each reward the mean of the OTHER rewards of its group.

    Args:
        rewards: float64 [samples], at least 2.

    Returns:
        float64 [samples] in reward units; sums to 0.

    Source:
        Back to basics, arXiv:2402.14740, equation 8.
    """
    others = (rewards.sum() - rewards) / (rewards.numel() - 1)
    return rewards - others


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo})
"""By the names that `train.advantage_estimator` takes."""


def _advantages(group: int, rewards: Sequence[float], estimate: Estimator) -> list[float]:
    for sample, reward in enumerate(rewards):
        if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
            raise UnusableRewardError(group, sample, reward)
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    advantages: list[float] = estimate(torch.tensor(rewards, dtype=torch.float64)).tolist()
    return advantages
