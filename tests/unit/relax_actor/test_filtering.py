"""Groups of equal rewards are recognised."""

import pytest

from relax_actor.rl.filtering import has_zero_variance


@pytest.mark.parametrize("rewards", [[], [0.5], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3], [1e9, 1e9]])
def test_equal_rewards_have_no_variance(rewards):
    assert has_zero_variance(rewards)


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.0, 0.0, 1e-5], [-1.0, 1.0]])
def test_different_rewards_have_some(rewards):
    assert not has_zero_variance(rewards)
