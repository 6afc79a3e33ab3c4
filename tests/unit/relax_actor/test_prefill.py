"""What prompts share, and how they are cut into batches."""

from hypothesis import given
from hypothesis import strategies as st

from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.prefill import common_prefix, distinct, prefill_batches
from relax_actor.engines.running import RunningSample

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=6)


@given(PROMPTS)
def test_the_common_prefix_is_the_longest_that_all_share(prompts):
    prefix = common_prefix(prompts)
    n = len(prefix)

    assert all(prompt[:n] == prefix for prompt in prompts)
    assert min(map(len, prompts)) == n or len({prompt[: n + 1] for prompt in prompts}) > 1


def test_samples_of_one_prompt_are_told_apart_from_their_first():
    def running(prompt, index):
        request = Request(
            group_id=0, sample_index=index, prompt=prompt, params=SamplingParams(max_new_tokens=1)
        )
        return RunningSample(request=request, budget_tokens=1)

    a, b, c, d = running((1, 2, 3), 0), running((4,), 1), running((1, 2, 3), 2), running((4,), 3)

    assert distinct([a, b, c, d]) == ([(4,), (1, 2, 3)], [b, a], [c, d])


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40).map(sorted))
def test_batches_cover_all_prompts_in_order_within_bounds(lengths):
    batches = list(prefill_batches(lengths))

    assert [i for part in batches for i in range(part.start, part.stop)] == list(range(len(lengths)))
    for part in batches:
        chosen = lengths[part]
        padded = len(chosen) * chosen[-1]
        assert len(chosen) == 1 or (padded <= 4096 and padded - sum(chosen) <= 0.25 * padded)


def test_a_long_prompt_does_not_pad_short_ones():
    assert list(prefill_batches([3, 3, 3, 300])) == [slice(0, 3), slice(3, 4)]


def test_equal_prompts_run_together():
    assert list(prefill_batches([8] * 16)) == [slice(0, 16)]
