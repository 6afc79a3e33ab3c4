"""Log-probs, filters and the choice of a token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actor.engines import sampling
from relax_actor.engines.base import SamplingParams
from relax_actor.engines.errors import LogitsError
from relax_actor.engines.randomness import token_uniforms
from relax_actor.engines.sampling import sample_tokens, token_logprobs

INF = math.inf


def params(**changes):
    return SamplingParams(max_new_tokens=1, **changes)


def sample(logits, uniforms, **changes):
    logits = torch.tensor(logits, dtype=torch.float32)
    return sample_tokens(
        logits, [params(**changes)] * len(logits), torch.tensor(uniforms, dtype=torch.float64)
    )


def support(logits, **changes):
    """Every token that some uniform number leads to."""
    uniforms = [i / 4096 for i in range(4096)] + [1 - 2**-53]
    tokens, _ = sample([logits] * len(uniforms), uniforms, **changes)
    return sorted(set(tokens.tolist()))


def uniforms_of(count, seed=0):
    return token_uniforms(seed, np.arange(count), 0, 0)


def reference(logits, u, temperature=1.0, top_k=0, top_p=1.0):
    """The same in float64, in plain Python."""
    scores = [x / temperature for x in logits]
    peak = max(scores)
    weights = [math.exp(x - peak) for x in scores]
    logprobs = [x - peak - math.log(sum(weights)) for x in scores]
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = ranked[: top_k or None]
    mass, before, nucleus, margin = sum(weights[i] for i in kept), 0.0, [], 1.0
    for i in kept:
        margin = min(margin, abs(before - top_p * mass) if 0 < top_p < 1 else 1.0)
        if not nucleus or before < top_p * mass:
            nucleus.append(i)
        before += weights[i]
    target, cdf = u * sum(weights[i] for i in nucleus), 0.0
    for i in sorted(nucleus):
        cdf += weights[i]
        if cdf > target:
            return i, logprobs[i], min(margin, abs(cdf - target))
        margin = min(margin, target - cdf)
    return max(nucleus), logprobs[max(nucleus)], 0.0


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.7}, {"top_k": 7, "top_p": 0.6}],
)
def test_frequencies_match_the_distribution(changes):
    count, logits = 40_000, torch.linspace(-1, 2, 12)
    tokens, _ = sample([logits.tolist()] * count, uniforms_of(count), **changes)

    expected = torch.tensor([1.0 * t for t in _exact(logits, **changes)])
    observed = torch.bincount(tokens, minlength=12) / count
    kept = expected > 0
    chi_square = count * ((observed - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert observed[~kept].sum() == 0
    assert chi_square < 30  # 11 degrees of freedom: p = 0.0016; the seed is fixed


def _exact(logits, temperature=1.0, top_k=0, top_p=1.0):
    weights = (logits.double() / temperature).softmax(-1)
    ranked = weights.argsort(descending=True)[: top_k or None]
    kept, mass = torch.zeros_like(weights), weights[ranked].sum()
    for i in ranked:
        if kept.sum() < top_p * mass:
            kept[i] = weights[i]
    return (kept / kept.sum()).tolist()


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-80, 80).map(lambda x: x / 4), min_size=1, max_size=30),
    u=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.0, 0.31, 0.83, 1.0]),
)
def test_agrees_with_a_float64_reference(logits, u, temperature, top_k, top_p):
    changes = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    token, logprob, margin = reference(logits, u, **changes)

    tokens, logprobs = sample([logits], [u], **changes)

    if tokens.item() == token:
        assert logprobs.item() == pytest.approx(logprob, abs=1e-4)
    else:  # only rounding at a boundary may decide otherwise
        assert margin < 1e-5


def test_a_row_does_not_depend_on_its_neighbours_or_its_place():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    mixed = [
        params(),
        params(temperature=0.0),
        params(top_k=3),
        params(top_p=0.5),
        params(temperature=0.7, forbidden_token_ids=(1, 2)),
        params(top_k=9, top_p=0.9),
    ]
    uniforms = torch.from_numpy(uniforms_of(6))
    together = sample_tokens(logits, mixed, uniforms)
    backwards = sample_tokens(logits.flip(0), mixed[::-1], uniforms.flip(0))

    for row in range(6):
        alone = sample_tokens(logits[row : row + 1], mixed[row : row + 1], uniforms[row : row + 1])
        assert alone[0].item() == together[0][row] == backwards[0][5 - row]
        assert alone[1].item() == pytest.approx(together[1][row].item(), abs=1e-6)


def test_cutting_a_batch_into_chunks_changes_nothing(monkeypatch):
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(4))
    args = (
        logits,
        [params(), params(temperature=0.0), *[params(top_k=4)] * 5],
        torch.from_numpy(uniforms_of(7)),
    )
    whole = sample_tokens(*args)

    monkeypatch.setattr(sampling, "_CHUNK_NUMBERS", 60)

    assert torch.equal(sample_tokens(*args)[0], whole[0])
    logits[5, 3] = math.nan
    with pytest.raises(LogitsError) as caught:
        sample_tokens(*args)
    assert caught.value.rows == [5]


def test_log_probs_are_those_before_top_k_and_top_p_and_after_forbidding():
    _, free = sample([[0.0, 0.0, 0.0, 0.0]], [0.1])
    _, narrowed = sample([[0.0, 0.0, 0.0, 0.0]], [0.1], top_k=1, top_p=0.1)
    _, masked = sample([[0.0, 0.0, 0.0, 0.0]], [0.1], forbidden_token_ids=(3, 1))

    assert free.item() == narrowed.item() == pytest.approx(math.log(1 / 4))
    assert masked.item() == pytest.approx(math.log(1 / 2))


def test_temperature_divides_the_logits():
    _, logprobs = sample([[1.0, 0.0]], [0.0], temperature=0.5)
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-2)))


def test_temperature_0_takes_the_best_token_and_reports_temperature_1():
    tokens, logprobs = sample([[0.0, 3.0, 3.0, 1.0]] * 2, [0.0, 0.999], temperature=0.0)

    assert tokens.tolist() == [1, 1]  # the lowest id of equals
    exact = torch.tensor([0.0, 3.0, 3.0, 1.0]).log_softmax(-1)[1]
    assert logprobs.tolist() == pytest.approx([exact.item()] * 2)


def test_top_p_0_keeps_the_best_token():
    assert support([1.0, 2.0, 3.0, 0.0], top_p=0.0) == [2]


def test_top_p_keeps_the_token_that_reaches_it():
    logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    assert support(logits, top_p=0.4) == [0]
    assert support(logits, top_p=0.6) == [0, 1]
    assert support(logits, top_p=0.8) == [0, 1, 2]
    assert support(logits, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_counts_within_the_top_k():
    logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    assert support(logits, top_k=2, top_p=0.6) == [0]  # 0.5 of 0.75 is two thirds


def test_top_k_larger_than_the_vocabulary_keeps_all():
    assert support([0.0, 0.0, 0.0], top_k=50) == [0, 1, 2]


def test_of_equals_the_lower_ids_are_kept():
    assert support([0.0] * 8, top_k=3) == [0, 1, 2]
    assert support([0.0] * 8, top_p=0.3) == [0, 1, 2]


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_k": 12}, {"top_p": 0.2}, {"top_p": 0.95}])
@pytest.mark.parametrize("levels", [1, 3, 40])
def test_looking_at_few_candidates_first_changes_nothing(monkeypatch, changes, levels):
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (20, 40), generator=generator).float() * 2
    args = (logits, [params(**changes)] * 20, torch.from_numpy(uniforms_of(20)))
    whole = sample_tokens(*args)

    monkeypatch.setattr(sampling, "_CANDIDATES", 8)

    assert torch.equal(sample_tokens(*args)[0], whole[0])


def test_minus_infinity_is_never_chosen():
    assert support([-INF, 0.0, -INF, 0.0, -INF]) == [1, 3]


def test_plus_infinity_takes_all_the_mass():
    tokens, logprobs = sample([[0.0, INF, 5.0, INF]] * 2, [0.1, 0.9])
    assert tokens.tolist() == [1, 3]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2)


def test_the_largest_and_the_smallest_uniform_choose_possible_tokens():
    tokens, _ = sample([[-INF, 0.0, 1.0, -INF]] * 2, [0.0, 1 - 2**-53])
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize("row", [[0.0, math.nan], [-INF, -INF], [INF, math.nan]])
def test_what_is_no_distribution_is_an_error_that_names_the_rows(row):
    with pytest.raises(LogitsError) as caught:
        sample([[0.0, 0.0], row, [0.0, INF]], [0.5, 0.5, 0.5])
    assert caught.value.rows == [1]


def test_forbidding_everything_is_an_error():
    with pytest.raises(LogitsError):
        sample([[0.0, 0.0]], [0.5], forbidden_token_ids=(0, 1))


def test_logits_are_left_as_they_were():
    logits = torch.zeros(1, 4)
    token_logprobs(logits, [params(forbidden_token_ids=(0,))])
    assert logits.tolist() == [[0.0] * 4]


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.zeros(1, 5000, dtype=torch.bfloat16)
    assert token_logprobs(logits, [params()])[0, 7].item() == pytest.approx(-math.log(5000), rel=1e-5)
