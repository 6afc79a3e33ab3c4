"""The policy loss against a float64 numpy reference, values and gradients."""

import numpy as np
import pytest
import torch

from relax_actor.rl.loss import LossTokens, clipped_loss, policy_loss, token_weights

LENGTHS = [3, 1, 4, 2]
DEFAULTS = {"clip_low": 0.2, "clip_high": 0.3, "tis_max": 2.0, "kl_coef": 0.0, "ratio_base": "trainer"}


def example(seed: int = 0) -> dict[str, np.ndarray]:
    """Ten tokens of four sequences, float32 values that no clip boundary is close to."""
    rng = np.random.default_rng(seed)
    n = sum(LENGTHS)
    logprobs = rng.uniform(-3, -0.5, n)
    values = {
        "logprobs": logprobs,
        "start_logprobs": logprobs + rng.normal(0, 0.3, n),
        "rollout_logprobs": logprobs + rng.normal(0, 0.6, n),
        "advantages": np.repeat(rng.normal(0, 1, len(LENGTHS)), LENGTHS),
        "weights": np.full(n, 1 / n),
        "reference_logprobs": logprobs + rng.normal(0, 0.4, n),
        "kl_weights": np.repeat([1, 0, 1, 1], LENGTHS) / n,
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def reference_loss(v: dict[str, np.ndarray], options: dict) -> float:
    """Write the loss out token by token in float64."""
    v = {name: value.astype(np.float64) for name, value in v.items()}
    base = v["start_logprobs"] if options["ratio_base"] == "trainer" else v["rollout_logprobs"]
    total = 0.0
    for t in range(len(base)):
        ratio = np.exp(v["logprobs"][t] - base[t])
        bounded = min(max(ratio, 1 - options["clip_low"]), 1 + options["clip_high"])
        gain = min(ratio * v["advantages"][t], bounded * v["advantages"][t])
        importance = np.exp(base[t] - v["rollout_logprobs"][t])
        if options["tis_max"]:
            gain *= min(importance, options["tis_max"])
        total -= v["weights"][t] * gain
        x = v["reference_logprobs"][t] - v["logprobs"][t]
        total += options["kl_coef"] * v["kl_weights"][t] * (np.exp(x) - 1 - x)
    return total


def reference_gradient(v: dict[str, np.ndarray], options: dict) -> list[float]:
    """Differentiate the reference by central differences."""
    gradient = []
    for t in range(len(v["logprobs"])):
        sides = []
        for h in (1e-6, -1e-6):
            moved = v["logprobs"].astype(np.float64)
            moved[t] += h
            sides.append(reference_loss({**v, "logprobs": moved}, options))
        gradient.append((sides[0] - sides[1]) / 2e-6)
    return gradient


def tensors(v: dict[str, np.ndarray]) -> LossTokens:
    made = {name: torch.from_numpy(value) for name, value in v.items()}
    made["logprobs"].requires_grad_()
    return LossTokens(**made)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ratio_base": "rollout"},
        {"tis_max": 0.0},
        {"kl_coef": 0.5},
        {"clip_low": 0.0, "clip_high": 10.0, "tis_max": 0.7},
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(options, seed):
    options = {**DEFAULTS, **options}
    values = example(seed)
    tokens = tensors(values)

    terms = policy_loss(tokens, **options)
    terms.loss.backward()

    assert terms.loss.item() == pytest.approx(reference_loss(values, options), rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(
        tokens.logprobs.grad, reference_gradient(values, options), rtol=1e-3, atol=1e-6
    )


def test_a_first_update_has_ratio_one_and_the_gradient_of_reinforce():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = LossTokens(
        logprobs=logprobs,
        start_logprobs=logprobs.detach(),
        rollout_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, -3.0]),
        weights=torch.tensor([0.5, 0.5]),
    )

    terms = policy_loss(tokens, **DEFAULTS)
    terms.loss.backward()

    assert terms.loss.item() == pytest.approx(1.0)
    assert logprobs.grad.tolist() == [-0.5, 1.5]
    assert (terms.clipped_tokens, terms.kl_sum) == (0, 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [
        (1.4, 1.0, True),
        (1.2, 1.0, False),
        (0.5, 1.0, False),
        (0.7, -1.0, True),
        (0.9, -1.0, False),
        (1.5, -1.0, False),
        (1.4, 0.0, False),
    ],
)
def test_the_clip_takes_the_gradient_only_where_the_ratio_has_gained_enough(ratio, advantage, is_clipped):
    logprobs = torch.tensor([ratio]).log().requires_grad_()

    loss, clipped = clipped_loss(
        logprobs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.3
    )
    loss.sum().backward()

    assert clipped.tolist() == [is_clipped]
    assert (logprobs.grad.item() != 0) == (not is_clipped and advantage != 0)


def test_policies_with_nothing_in_common_give_a_finite_loss_and_gradient():
    logprobs = torch.tensor([-0.1, -1e4], requires_grad=True)
    tokens = LossTokens(
        logprobs=logprobs,
        start_logprobs=torch.tensor([-1e4, -0.1]),
        rollout_logprobs=torch.tensor([-0.1, -1e4]),
        advantages=torch.tensor([-1.0, -1.0]),
        weights=torch.tensor([0.5, 0.5]),
        reference_logprobs=torch.tensor([-1e4, -0.1]),
    )

    terms = policy_loss(tokens, **{**DEFAULTS, "kl_coef": 1.0})
    terms.loss.backward()

    assert torch.isfinite(terms.loss)
    assert torch.isfinite(logprobs.grad).all()


def test_kl_is_measured_over_all_tokens_and_acts_where_its_weights_are():
    values = example()
    values["advantages"][:] = 0
    tokens = tensors(values)

    terms = policy_loss(tokens, **{**DEFAULTS, "kl_coef": 0.1})
    terms.loss.backward()

    x = values["reference_logprobs"].astype(np.float64) - values["logprobs"]
    assert terms.kl_sum == pytest.approx((np.exp(x) - 1 - x).sum(), rel=1e-5)
    assert (tokens.logprobs.grad == 0).tolist() == (values["kl_weights"] == 0).tolist()


def test_without_kl_weights_the_kl_term_acts_on_every_token():
    values = example()
    del values["kl_weights"]
    tokens = tensors(values)

    policy_loss(tokens, **{**DEFAULTS, "kl_coef": 0.1}).loss.backward()

    everywhere = {**values, "kl_weights": values["weights"]}
    expected = reference_gradient(everywhere, {**DEFAULTS, "kl_coef": 0.1})
    np.testing.assert_allclose(tokens.logprobs.grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_weights_of_an_update_sum_to_one(aggregation):
    weights = token_weights(
        torch.tensor(LENGTHS), aggregation=aggregation, total_tokens=sum(LENGTHS), total_sequences=4
    )

    assert weights.sum().item() == pytest.approx(1.0)


def test_token_mean_counts_tokens_alike_and_sequence_mean_sequences():
    options = {"total_tokens": 10, "total_sequences": 4}
    by_token = token_weights(torch.tensor(LENGTHS), aggregation="token_mean", **options)
    by_sequence = token_weights(torch.tensor(LENGTHS), aggregation="sequence_mean", **options)

    np.testing.assert_allclose(by_token, [0.1] * 10, rtol=1e-6)
    np.testing.assert_allclose(by_sequence, np.repeat(0.25 / np.array(LENGTHS), LENGTHS), rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_do_not_depend_on_how_an_update_is_split(aggregation):
    options = {"aggregation": aggregation, "total_tokens": 10, "total_sequences": 4}

    whole = token_weights(torch.tensor(LENGTHS), **options)
    parts = [token_weights(torch.tensor(part), **options) for part in (LENGTHS[:1], LENGTHS[1:])]

    assert torch.equal(torch.cat(parts), whole)
