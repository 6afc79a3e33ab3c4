"""Numbers that depend on what they are for."""

import numpy as np
import pytest

from relax_actor.engines.randomness import _mixed, token_uniforms


def test_a_number_is_fixed_by_its_four_parts():
    assert token_uniforms(7, 3, 1, 0)[0] == token_uniforms(7, [9, 3], [0, 1], [5, 0])[1]


def test_numbers_are_pinned():
    """Others would mean that no earlier run can be repeated."""
    assert _mixed(np.zeros(1, dtype=np.uint64))[0] == 0xE220A8397B1DCDAF  # SplitMix64's first of seed 0
    assert token_uniforms(0, 0, 0, 0)[0] == float.fromhex("0x1.0983a45556400p-3")


@pytest.mark.parametrize("changed", [(8, 3, 1, 0), (7, 4, 1, 0), (7, 3, 2, 0), (7, 3, 1, 1), (7, 1, 3, 0)])
def test_every_part_and_its_place_matter(changed):
    assert token_uniforms(*changed)[0] != token_uniforms(7, 3, 1, 0)[0]


def test_negative_groups_and_seeds_of_any_size_have_numbers_of_their_own():
    numbers = [token_uniforms(s, g, 0, 0)[0] for s in (-1, 0, 2**63, 2**64 - 2) for g in (-5, 5)]
    assert len(set(numbers)) == 8
    assert all(0 <= x < 1 for x in numbers)


def test_numbers_are_uniform_and_neighbours_independent():
    grid = token_uniforms(1, np.repeat(np.arange(100), 1000), np.tile(np.arange(1000), 100), 3)
    counts = np.histogram(grid, bins=64, range=(0, 1))[0]
    chi_square = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()

    assert chi_square < 110  # 63 degrees of freedom: p = 0.0002; the seed is fixed
    for lag in (1, 1000):
        assert abs(np.corrcoef(grid[:-lag], grid[lag:])[0, 1]) < 0.015
