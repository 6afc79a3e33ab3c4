"""Stop strings: found with the token that makes one whole, wherever it begins and ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.running import RunningSample
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.protocol import FinishReason

PIECES = [b"a", b"b", b"ab", b"ba", b"\n", b"a\nb", "ä".encode()[:1], "ä".encode()[1:], b"", b"aab"]


def text_of(tokens):
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def first_end(tokens, strings):
    counts = range(1, len(tokens) + 1)
    return next((n for n in counts if any(each in text_of(tokens[:n]) for each in strings)), None)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 2)),
    strings=st.lists(st.text("ab\nä", min_size=1, max_size=6), min_size=1, max_size=3),
    begin=st.integers(0, 60),
)
def test_the_end_is_the_first_token_that_makes_a_string_whole(tokens, strings, begin):
    end = first_end(tokens, strings)
    begin = min(begin, len(tokens) if end is None else end - 1)
    assert StopStrings(strings, text_of).end(tokens, begin) == end


def test_tokens_without_text_may_be_between():
    assert StopStrings(["ab"], text_of).end([1, 0, 8, 8, 1, 0], 0) == 5


def test_nothing_new_has_no_end():
    assert StopStrings(["a"], text_of).end([0, 0], 2) is None
    assert StopStrings(["a"], text_of).end([], 0) is None


def sample(*strings, prefix=()):
    params = SamplingParams(max_new_tokens=9, stop_strings=StopStrings(strings, text_of))
    made = RunningSample.of(Request(group_id=0, sample_index=0, prompt=(0, 1), params=params), 9)
    made.extend(prefix, [-1.0] * len(prefix), 3)
    return made


def test_a_sample_stops_with_its_string_and_not_with_the_prompts():
    made = sample("ba")
    made.append(0, -0.5, 4)  # the prompt ends with b
    assert made.finish_reason is None
    made.append(1, -0.5, 4)
    made.append(0, -0.5, 4)
    assert made.finish_reason is FinishReason.STOP


def test_a_sample_is_cut_with_all_that_it_has_of_a_token():
    made = sample("ba", prefix=(0, 1))
    made.extend((0, 1, 1), (-0.1, -0.2, -0.3), 4)
    assert made.stop_string_end(2) == 3
    made.cut(3)
    assert (made.tokens, made.logprobs, made.versions) == ([0, 1, 0], [-1.0, -1.0, -0.1], [3, 3, 4])
    assert made.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=1)])
def test_without_strings_no_text_is_made(params):
    made = RunningSample.of(Request(group_id=0, sample_index=0, prompt=(0,), params=params), 3)
    made.extend((0, 1), (-0.1, -0.2), 1)
    assert made.stop_string_end(0) is None
