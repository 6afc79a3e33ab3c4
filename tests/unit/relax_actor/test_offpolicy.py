"""Importance weights and mismatch against a plain numpy reference."""

import math

import numpy as np
import pytest
import torch

from relax_actor.rl.offpolicy import LOG_RATIO_LIMIT, bounded_log_ratio, k3, mismatch, tis_weights

TRAINER = [-1.0, -0.2, -3.0, -7.0]
ROLLOUT = [-1.1, -0.9, -2.0, -7.0]


def test_weights_are_the_truncated_ratio():
    weights = tis_weights(torch.tensor(TRAINER), torch.tensor(ROLLOUT), maximum=1.5)

    expected = np.minimum(np.exp(np.float64(TRAINER) - np.float64(ROLLOUT)), 1.5)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_a_difference_that_overflows_float32_gives_the_maximum():
    weights = tis_weights(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]), maximum=2.0)

    np.testing.assert_allclose(weights, [2.0, 0.0], rtol=1e-6)


def test_a_maximum_of_zero_turns_the_correction_off():
    assert tis_weights(torch.tensor(TRAINER), torch.tensor(ROLLOUT), maximum=0.0).tolist() == [1.0] * 4


def test_weights_carry_no_gradient():
    trainer = torch.tensor(TRAINER, requires_grad=True)

    assert not tis_weights(trainer, torch.tensor(ROLLOUT), maximum=2.0).requires_grad


def test_k3_is_its_formula_and_never_negative():
    x = torch.linspace(-8, 8, 101)

    x64 = x.numpy().astype(np.float64)
    np.testing.assert_allclose(k3(x), np.exp(x64) - 1 - x64, rtol=1e-5, atol=1e-6)
    assert (k3(x) >= 0).all()


def test_k3_keeps_its_precision_near_zero():
    assert k3(torch.tensor([1e-3])).item() == pytest.approx(0.5e-6, rel=1e-3)


def test_k3_does_not_overflow_and_still_pulls_from_below():
    x = torch.tensor([1e4, -1e4], requires_grad=True)

    k3(x).sum().backward()

    assert torch.isfinite(k3(x)).all()
    assert x.grad.tolist() == [0.0, -1.0]


def test_log_ratios_are_bounded_on_both_sides():
    ratios = bounded_log_ratio(torch.tensor([0.0, -1e5, 0.5]), torch.tensor([-1e5, 0.0, 0.25]))

    assert ratios.tolist() == [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT, 0.25]


def test_mismatch_sums_over_the_tokens():
    found = mismatch(torch.tensor(TRAINER), torch.tensor(ROLLOUT))

    difference = np.float64(TRAINER) - np.float64(ROLLOUT)
    assert found.abs_sum == pytest.approx(np.abs(difference).sum(), rel=1e-6)
    assert found.k3_sum == pytest.approx((np.exp(difference) - 1 - difference).sum(), rel=1e-5)
    assert found.max_ratio == pytest.approx(math.exp(0.7), rel=1e-5)


def test_mismatch_of_nothing_is_zero():
    found = mismatch(torch.zeros(0), torch.zeros(0))

    assert (found.abs_sum, found.k3_sum, found.max_ratio) == (0.0, 0.0, 0.0)
