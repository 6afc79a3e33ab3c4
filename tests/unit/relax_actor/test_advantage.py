"""Advantages against a plain numpy reference."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.rl.advantage import ESTIMATORS, UnusableRewardError, group_advantages, has_signal

REWARDS = [[0.0, 1.0], [0.0, 0.0, 1.0], [-3.0, 2.5, 2.5, 10.0, 0.25], [1e-9, 2e-9, 4e-9]]

rewards_of_a_group = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16)


def reference(name: str, rewards: list[float]) -> list[float]:
    """Write the formulas out sample by sample."""
    n = len(rewards)
    mean = math.fsum(rewards) / n
    if name == "dr_grpo":
        return [r - mean for r in rewards]
    if name == "grpo":
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
        return [(r - mean) / (std + 1e-6) for r in rewards]
    return [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_computes_its_formula(name, rewards):
    advantages = group_advantages({3: rewards}, name)[3]

    np.testing.assert_allclose(advantages, reference(name, rewards), rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rewards=rewards_of_a_group)
def test_the_advantages_of_a_group_sum_to_zero(name, rewards):
    advantages = group_advantages({0: rewards}, name)[0]

    assert abs(sum(advantages)) <= 1e-9 * (1 + sum(abs(a) for a in advantages))


@pytest.mark.parametrize("name", ESTIMATORS)
@given(reward=st.floats(-1e30, 1e30), n=st.integers(0, 9))
def test_equal_rewards_have_advantage_exactly_zero(name, reward, n):
    """Whatever rounding makes of their mean: three times 0.1 has another mean than 0.1."""
    assert group_advantages({0: [reward] * n}, name) == {0: [0.0] * n}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_groups_may_have_lost_samples_and_keep_their_order(name):
    groups = {9: [0.0, 1.0, 1.0], 2: [1.0, 0.0], 5: [1.0]}

    advantages = group_advantages(groups, name)

    assert [(group, len(a)) for group, a in advantages.items()] == [(9, 3), (2, 2), (5, 1)]
    assert advantages[2] == group_advantages({2: [1.0, 0.0]}, name)[2]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_extreme_rewards_stay_finite(name):
    advantages = group_advantages({0: [1e30, -1e30, 0.0]}, name)[0]

    assert np.isfinite(np.float32(advantages)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31, -1.7e308])
def test_an_unusable_reward_is_refused_by_the_name_of_its_group(bad):
    with pytest.raises(ValueError, match="reward 1 of group 41 is ") as caught:
        group_advantages({40: [0.0, 1.0], 41: [0.5, bad, 0.5]}, "grpo")

    assert isinstance(caught.value, UnusableRewardError)
    assert (caught.value.group, caught.value.sample) == (41, 1)


def test_nan_is_refused_also_where_all_rewards_are_equal():
    with pytest.raises(UnusableRewardError):
        group_advantages({0: [math.nan]}, "rloo")


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(KeyError, match="gae"):
        group_advantages({}, "gae")


def test_a_group_has_signal_where_two_rewards_differ():
    assert has_signal([0.0, 0.0, 1e-12])
    assert not has_signal([0.1, 0.1, 0.1])
    assert not has_signal([2.0])
    assert not has_signal([])
