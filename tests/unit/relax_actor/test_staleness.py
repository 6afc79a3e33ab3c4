"""How old a sample is."""

import pytest

from relax_actor.rl.staleness import histogram, staleness


def test_staleness_counts_the_versions_since_the_oldest_token():
    assert staleness(7, 5) == 2


def test_the_histogram_is_sorted_and_has_no_gaps_filled_in():
    assert list(histogram(9, [8, 9, 5, 9]).items()) == [(0, 2), (1, 1), (4, 1)]


def test_a_sample_newer_than_the_trainer_is_an_error_that_names_both_versions():
    with pytest.raises(ValueError, match=r"version 4, after the trainer's 3"):
        staleness(3, 4)
