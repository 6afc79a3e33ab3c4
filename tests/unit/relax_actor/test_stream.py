"""The prompt stream: every row once an epoch, in an order that never changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.data.stream import Position, PromptStream, eval_group_id, eval_position


@given(
    rows=st.integers(1, 60), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 5), shuffle=st.booleans()
)
def test_each_epoch_has_every_row_exactly_once(rows, seed, epoch, shuffle):
    stream = PromptStream(rows, seed=seed, shuffle=shuffle)

    places = [stream.at(epoch * rows + i) for i in range(rows)]

    assert {place.epoch for place in places} == {epoch}
    assert sorted(place.row for place in places) == list(range(rows))


def test_the_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        stream = PromptStream(50, seed=seed)
        return [stream.at(50 * epoch + i).row for i in range(50)]

    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_the_order_is_the_same_for_ever():
    """A resumed run of another NumPy version must go on where it was: these are Philox words, sorted."""
    stream = PromptStream(8, seed=1)

    assert [stream.at(n).row for n in range(16)] == [3, 5, 2, 7, 0, 6, 1, 4, 0, 6, 5, 3, 4, 7, 2, 1]


def test_without_shuffling_every_epoch_is_in_file_order():
    stream = PromptStream(3, seed=0, shuffle=False)

    assert [stream.at(n) for n in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 1)]


def test_an_epoch_border_is_a_position_like_any_other():
    """BUGCASES 22: a run that resumes there goes on with the next epoch."""
    stream = PromptStream(4, seed=3)

    assert stream.at(3).epoch == 0
    assert stream.at(4) == Position(1, stream.at(4).row)


@pytest.mark.parametrize("make", [lambda: PromptStream(0, seed=0), lambda: PromptStream(2, seed=0).at(-1)])
def test_a_stream_without_rows_and_a_negative_position_are_refused(make):
    with pytest.raises(ValueError, match="prompt stream"):
        make()


@given(prompts=st.integers(1, 50), data=st.data(), eval_round=st.integers(0, 1000))
def test_evaluation_groups_are_negative_and_lead_back(prompts, data, eval_round):
    prompt = data.draw(st.integers(0, prompts - 1))

    group_id = eval_group_id(eval_round, prompt, prompts)

    assert group_id < 0
    assert eval_position(group_id, prompts) == (eval_round, prompt)


def test_no_two_evaluation_prompts_share_a_group():
    ids = [eval_group_id(eval_round, prompt, 3) for eval_round in range(3) for prompt in range(3)]

    assert ids == list(range(-1, -10, -1))


@pytest.mark.parametrize("arguments", [(-1, 0, 2), (0, 2, 2), (0, -1, 2), (0, 0, 0)])
def test_an_evaluation_prompt_that_is_none_is_refused(arguments):
    with pytest.raises(ValueError, match="no evaluation prompt"):
        eval_group_id(*arguments)


@pytest.mark.parametrize("arguments", [(0, 3), (-1, 0)])
def test_a_group_that_is_no_evaluation_is_refused(arguments):
    with pytest.raises(ValueError, match="no evaluation prompt"):
        eval_position(*arguments)
