"""Rows of keys and values that are written in place."""

import pytest
import torch

from relax_actor.engines.kv_cache import SlotCache, Window

HEADS, SIZE = 2, 4


def window(first_row, positions):
    return Window(first_row=first_row, positions=torch.tensor(positions))


def write(cache, target, value):
    """Write `value` into all keys of the window of every layer, its negative into the values."""
    cache.open(target)
    states = torch.full((len(target.positions), HEADS, target.positions.shape[1], SIZE), float(value))
    return [cache.hf_cache.update(states, -states, layer, {}) for layer in range(len(cache.layers))]


def row(cache, index, length, layer=0):
    """What head 0 holds."""
    assert torch.equal(cache.layers[layer].keys, -cache.layers[layer].values)
    return cache.layers[layer].keys[index, 0, :length, 0].tolist()


def test_each_row_is_written_at_positions_of_its_own():
    cache = SlotCache(layers=2, rows=3)
    write(cache, window(0, [[0, 1, 2], [0, 1, 2], [0, 1, 2]]), 1)
    write(cache, window(1, [[1], [3]]), 7)

    for layer in (0, 1):
        assert [row(cache, i, 4, layer) for i in range(3)] == [[1, 1, 1, 0], [1, 7, 1, 0], [1, 1, 1, 7]]


def test_a_forward_sees_views_up_to_the_longest_row():
    cache = SlotCache(layers=1, rows=4)
    ((keys, values),) = write(cache, window(1, [[2], [5]]), 3)

    assert keys.shape == values.shape == (2, HEADS, 6, SIZE)
    assert keys.data_ptr() == cache.layers[0].keys[1].data_ptr()
    assert cache.hf_cache.get_seq_length() == 6
    assert cache.layers[0].get_mask_sizes(1) == (6, 0)
    assert cache.layers[0].get_max_length() == -1


def test_the_mask_hides_what_lies_after_a_tokens_own_position():
    mask = window(0, [[0, 1], [2, 3]]).mask(4, torch.float32)

    assert mask.shape == (2, 1, 2, 4)
    assert (mask[:, 0] == 0).tolist() == [
        [[True, False, False, False], [True, True, False, False]],
        [[True, True, True, False], [True, True, True, True]],
    ]
    assert mask.isneginf().sum() == 6


def test_growing_keeps_what_is_there():
    cache = SlotCache(layers=2, rows=2, capacity_tokens=10)
    write(cache, window(0, [[0, 1], [0, 1]]), 5)
    assert cache.capacity_tokens == 64

    write(cache, window(1, [[64]]), 9)

    assert cache.capacity_tokens == 128
    assert row(cache, 0, 3, layer=1) == [5, 5, 0]
    assert row(cache, 1, 65, layer=1)[-2:] == [0, 9]


def test_growing_jumps_to_a_length_beyond_twice_the_capacity():
    cache = SlotCache(layers=1, rows=1)
    cache.open(window(0, [[499]]))
    assert cache.capacity_tokens == 512


def test_rows_are_copied_within_a_cache():
    cache = SlotCache(layers=2, rows=4)
    write(cache, window(0, [[0, 1, 2]]), 1)
    write(cache, window(1, [[0, 1, 2]]), 2)

    cache.copy(cache, [0, 1], [3, 2], length=2)

    assert [row(cache, i, 3, layer=1) for i in (2, 3)] == [[2, 2, 0], [1, 1, 0]]


@pytest.mark.parametrize("capacity", [64, 128])
def test_rows_are_copied_into_a_cache_that_was_never_written(capacity):
    source = SlotCache(layers=2, rows=1, capacity_tokens=100)
    write(source, window(0, [list(range(70))]), 4)
    cache = SlotCache(layers=2, rows=2, capacity_tokens=capacity)

    cache.copy(source, [0], [1], length=70)

    assert row(cache, 1, 72, layer=1) == [4] * 70 + [0, 0]
    assert row(cache, 0, 72) == [0] * 72


def test_copying_nothing_is_allowed():
    cache = SlotCache(layers=1, rows=1)
    cache.copy(cache, [], [], length=3)
    cache.copy(cache, [0], [0], length=0)
    assert not cache.layers[0].is_initialized
