"""How a batch is dealt to updates and micro-batches."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.rl.batching import (
    Cut,
    balanced_by_tokens,
    filled_by_tokens,
    micro_batches,
    nearest_multiples,
    plan_updates,
    split_evenly,
)

positive = st.integers(1, 20)


@given(st.lists(st.integers()), positive, positive)
def test_every_sample_is_dealt_once_and_in_order(samples, updates, size):
    plan = plan_updates(samples, updates=updates, cut=Cut(size=size, tokens=len))

    assert [sample for update in plan for part in update for sample in part] == samples


@given(st.lists(st.integers()), positive, positive)
def test_no_update_and_no_micro_batch_is_empty_or_too_large(samples, updates, size):
    plan = plan_updates(samples, updates=updates, cut=Cut(size=size, tokens=len))

    assert len(plan) == min(updates, len(samples))
    assert all(0 < len(part) <= size for update in plan for part in update)


@given(st.lists(st.integers()), positive)
def test_parts_differ_by_one_sample_at_most(samples, parts):
    sizes = [len(part) for part in split_evenly(samples, parts)]

    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


def test_only_the_last_micro_batch_is_smaller():
    assert micro_batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize(
    ("value", "multiple", "nearby"),
    [(10, 4, (8, 12)), (8, 4, (8, 8)), (3, 4, (4, 4)), (0, 4, (4, 4)), (-5, 4, (4, 4)), (7, 1, (7, 7))],
)
def test_the_legal_values_nearby_are_positive_multiples(value, multiple, nearby):
    assert nearest_multiples(value, multiple) == nearby


@pytest.mark.parametrize("call", [split_evenly, micro_batches])
def test_nothing_can_be_cut_into_zero_parts(call):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        call([1], 0)


def test_a_multiple_of_zero_is_refused():
    with pytest.raises(ValueError, match="multiple must be at least 1"):
        nearest_multiples(5, 0)


def test_a_launcher_can_use_it_without_loading_torch():
    check = "import sys, relax_actor.rl.batching, relax_actor.rl.staleness; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


lengths = st.lists(st.integers(1, 50), max_size=40)
limits = st.integers(1, 120)


@given(lengths, limits)
def test_a_token_budget_bounds_every_micro_batch_of_more_than_one_sample(tokens, limit):
    parts = balanced_by_tokens(tokens, tokens, limit)

    assert [count for part in parts for count in part] == tokens
    assert all(sum(part) <= limit or len(part) == 1 for part in parts)
    assert len(parts) == len(filled_by_tokens(tokens, tokens, limit)), "no more of them than are needed"


@given(lengths, limits)
def test_micro_batches_by_tokens_are_as_even_as_the_order_allows(tokens, limit):
    parts = balanced_by_tokens(tokens, tokens, limit)
    largest = max((sum(part) for part in parts if len(part) > 1), default=0)

    assert not largest or len(filled_by_tokens(tokens, tokens, largest - 1)) > len(parts)


@given(lengths, st.integers(1, 9), st.integers(0, 120), st.data())
def test_how_samples_trickle_in_does_not_change_where_they_are_cut(tokens, size, limit, data):
    cut = Cut(size=size, max_tokens=limit, tokens=lambda count: count)
    at_once, left = cut.full(tokens)

    rest, trickled = [], []
    for count in tokens:
        full, rest = cut.full([*rest, count])
        trickled += full
    if data.draw(st.booleans()):  # and one that ends nothing
        full, rest = cut.full(rest)
        trickled += full

    assert (trickled, rest) == (at_once, left)
    assert [count for part in [*trickled, rest] for count in part] == tokens


def test_a_cut_of_nothing_is_nothing():
    assert Cut(size=3, tokens=len).all([]) == Cut(size=3, max_tokens=9, tokens=len).all([]) == []
    assert Cut(size=3, max_tokens=9, tokens=len).full([]) == ([], [])
    with pytest.raises(ValueError, match="micro-batch size"):
        Cut(size=0, tokens=len)
