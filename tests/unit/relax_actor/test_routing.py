"""Routed experts: packed, checked, spliced, compared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from relax_actor.errors import RoutedExpertsError, RoutingMismatchError, UnsupportedRoutingError
from relax_actor.rl.routing import (
    DENSE,
    RouteLayout,
    check_length,
    check_packed,
    first_mismatch,
    layout_of,
    pack,
    routed_tokens,
    splice,
    unpack,
)

KEY = (3, 1)
LAYOUT = RouteLayout(experts=8, top_k=2, layers=3, moe_layers=(0, 2))
QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts_per_tok": 2}


def routes(tokens, *, experts=8, layers=3, top_k=2, seed=0):
    return np.random.default_rng(seed).integers(0, experts, (tokens, layers, top_k), dtype=np.int32)


@pytest.mark.parametrize(
    ("config", "moe_layers"),
    [
        (QWEN | {"num_experts": 8}, (0, 1, 2, 3)),
        (QWEN | {"num_local_experts": 8, "mlp_only_layers": [1]}, (0, 2, 3)),
        (QWEN | {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        (QWEN | {"model_type": "mixtral", "num_local_experts": 8}, (0, 1, 2, 3)),
    ],
)
def test_the_layout_is_read_from_the_models_configuration(config, moe_layers):
    assert layout_of(config) == RouteLayout(experts=8, top_k=2, layers=4, moe_layers=moe_layers)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "has no experts"),
        (QWEN | {"num_experts": 8, "mlp_only_layers": [0, 1, 2, 3]}, "has no experts"),
        (
            QWEN | {"num_experts": 8, "model_type": "deepseek_v4"},
            "not known here; known are mixtral, qwen3_moe",
        ),
        ({}, "`None` has no experts"),
    ],
)
def test_a_model_without_known_routers_is_refused_by_name(config, fact):
    with pytest.raises(UnsupportedRoutingError, match=fact):
        layout_of(config)


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_an_expert_takes_a_byte_or_two(experts, dtype):
    layout = RouteLayout(experts=experts, top_k=2, layers=3, moe_layers=(0, 1, 2))
    packed = pack(routes(5, experts=experts), layout, KEY)
    assert packed.dtype == dtype
    assert (unpack(packed, layout) == routes(5, experts=experts)).all()


@given(arrays(np.int32, (4, 3, 2), elements=st.integers(0, 7)))
def test_packing_loses_nothing_but_what_dense_layers_held(sampled):
    restored = unpack(pack(sampled, LAYOUT, KEY), LAYOUT)
    assert (restored[:, [0, 2]] == sampled[:, [0, 2]]).all()
    assert (restored[:, 1] == DENSE).all()
    assert (pack(restored, LAYOUT, KEY) == pack(sampled, LAYOUT, KEY)).all()


@pytest.mark.parametrize("shape", [(5, 2, 2), (5, 3, 1), (5, 6)])
def test_routes_of_another_shape_are_refused(shape):
    with pytest.raises(RoutedExpertsError, match="sample 1 of group 3 have shape"):
        pack(np.zeros(shape, np.int32), LAYOUT, KEY)
    with pytest.raises(RoutedExpertsError, match="have shape"):
        check_packed(np.zeros((5, 3, 2), np.uint8), LAYOUT, KEY)


@pytest.mark.parametrize("expert", [8, -1, 255])
def test_an_expert_the_model_does_not_have_is_named(expert):
    wrong = routes(5)
    wrong[4, 2, 1] = expert
    with pytest.raises(RoutedExpertsError, match=f"expert {expert} at token 4, layer 2; the model has 8"):
        pack(wrong, LAYOUT, KEY)


def test_stored_routes_are_checked_as_if_they_were_packed():
    packed = pack(routes(5), LAYOUT, KEY)
    check_packed(packed, LAYOUT, KEY)
    packed[2, 1, 0] = 9
    with pytest.raises(RoutedExpertsError, match="expert 9 at token 2, layer 2"):
        check_packed(packed, LAYOUT, KEY)


def test_the_last_token_has_no_routes():
    assert routed_tokens(4, 3) == 6
    check_length(routes(6), 4, 3, KEY)


@pytest.mark.parametrize("tokens", [5, 7])
def test_a_wrong_length_is_refused_with_both_numbers(tokens):
    with pytest.raises(
        RoutedExpertsError, match=f"are of {tokens} tokens; 4 prompt and 3 response tokens have 6"
    ):
        check_length(routes(tokens), 4, 3, KEY)


def test_old_tokens_keep_their_routes_and_new_ones_are_appended():
    kept, whole = routes(4, seed=1), routes(7, seed=2)
    spliced = splice(kept, whole, KEY)
    assert (spliced[:4] == kept).all()
    assert (spliced[4:] == whole[4:]).all()
    assert splice(None, whole, KEY) is whole


@pytest.mark.parametrize("whole", [routes(3), routes(7, layers=2)])
def test_routes_that_do_not_continue_others_are_refused(whole):
    with pytest.raises(RoutedExpertsError, match="do not fit one another"):
        splice(routes(4), whole, KEY)


def test_the_order_of_a_tokens_experts_does_not_count():
    left = routes(5)
    assert first_mismatch(left, left[:, :, ::-1]) is None


def test_the_first_mismatch_is_of_the_first_token_and_in_it_of_the_first_layer():
    left = np.tile(np.array([1, 0], np.int32), (5, 3, 1))
    right = left.copy()
    right[4, 0], right[3, 2], right[3, 1] = (2, 3), (4, 5), (7, 0)
    found = first_mismatch(left, right)
    assert found is not None
    assert (found.token, found.place, found.left, found.right) == (3, 1, (0, 1), (0, 7))


def test_a_mismatch_is_told_with_token_layer_and_both_sets():
    error = RoutingMismatchError(
        KEY, token=9, layer=4, recorded=(1, 2), own=(1, 3), differing_frac=0.25, tolerance_frac=0.1
    )
    assert (error.sample, error.token, error.layer, error.recorded, error.own) == (KEY, 9, 4, (1, 2), (1, 3))
    assert "token 9, layer 4 of sample 1 of group 3: [1, 2] recorded, [1, 3] now" in str(error)
    assert "25.00%" in str(error)
