"""Importance weights and mismatch against a plain numpy reference."""

import math

import numpy as np
import pytest
import torch

from relax_actor.rl.apart import Mismatch, merged_versions
from relax_actor.rl.offpolicy import (
    LOG_RATIO_LIMIT,
    bounded_log_ratio,
    k3,
    mismatch,
    mismatch_by_version,
    tis_weights,
)

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


def test_mismatch_by_version_tells_the_tokens_of_each_policy_apart():
    trainer, rollout = torch.tensor(TRAINER), torch.tensor(ROLLOUT)
    versions = torch.arange(len(TRAINER), dtype=torch.int32) % 2 + 6

    found = mismatch_by_version(trainer, rollout, versions)

    assert list(found) == [6, 7]
    assert found[7] == mismatch(trainer[1::2], rollout[1::2])
    whole = mismatch(trainer, rollout)
    both = found[6].plus(found[7])
    assert (both.tokens, both.max_ratio) == (whole.tokens, whole.max_ratio)
    assert both.abs_sum == pytest.approx(whole.abs_sum, rel=1e-6)
    assert both.means()["k3"] == pytest.approx(whole.k3_sum / whole.tokens, rel=1e-5)


def test_what_parts_measured_of_a_version_is_added_up():
    one, other = (Mismatch(abs_sum=n, k3_sum=n, max_ratio=n, tokens=int(n)) for n in (1.0, 2.0))

    merged = merged_versions([{7: one, 5: one}, {7: other}, {}])

    assert list(merged) == [5, 7]
    assert merged[7] == Mismatch(abs_sum=3.0, k3_sum=3.0, max_ratio=2.0, tokens=3)


def test_the_means_of_nothing_are_zero():
    means = Mismatch(abs_sum=0.0, k3_sum=0.0, max_ratio=0.0).means()
    assert means == {"tokens": 0, "abs": 0.0, "k3": 0.0, "max_ratio": 0.0}
