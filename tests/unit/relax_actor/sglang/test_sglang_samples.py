"""What becomes of a sample when the server answers: a stop string that it has not seen."""

import base64

import numpy as np
import pytest

from relax_actor.engines.base import Prefix, Request, SamplingParams
from relax_actor.engines.running import RunningSample
from relax_actor.engines.sglang.requests import Flight, GenerationSettings, request_body
from relax_actor.engines.sglang.samples import Samples
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.protocol import FinishReason

KEY, PROMPT = (3, 0), (5, 6, 7)
STOP = StopStrings(["8><9"], lambda tokens: "".join(f"<{token}>" for token in tokens))


def routes(begin, end):
    """Return one expert of one layer a token, by its place."""
    return np.arange(begin, end, dtype=np.int32).reshape(-1, 1, 1)


def flight(*, prefix_routes=None):
    prefix = Prefix(tokens=(4, 8), logprobs=(-1.0, -1.0), versions=(1, 1), routed_experts=prefix_routes)
    request = Request(
        group_id=KEY[0],
        sample_index=KEY[1],
        prompt=PROMPT,
        params=SamplingParams(max_new_tokens=20, stop_strings=STOP),
        prefix=prefix,
    )
    return Flight(sample=RunningSample.of(request, 20), rid="r", begun=2, submitted=2, version=2)


def answer(*tokens, finish=None, **meta):
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": finish and {"type": finish},
            "weight_version": "2",
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        }
        | meta,
    }


def samples(**settings):
    return Samples(GenerationSettings(seed=0, **settings), spans=True, late_by_a_step=False)


def spans(count):
    return [{"version": "2", "start": 0, "end": count}]


def test_the_server_is_told_which_strings_end_a_sample():
    sampling = request_body(flight(), GenerationSettings(seed=0))["sampling_params"]
    assert (sampling["stop"], sampling["no_stop_trim"]) == (["8><9"], True)


def test_the_routes_of_what_is_cut_off_go_with_it():
    mine, sent = samples(expert_shape=(1, 1)), flight(prefix_routes=routes(100, 104))
    mine.sent(sent)
    encoded = base64.b64encode(routes(0, 7).tobytes()).decode()  # of 3 + 5 tokens, less one
    whole = answer(9, 11, 12, finish="length", weight_versions=spans(3), routed_experts=encoded)
    mine.heard(sent, whole)
    (done,) = mine.take_finished()

    assert (done.tokens.tolist(), done.versions.tolist()) == ([4, 8, 9], [1, 1, 2])
    assert done.finish_reason is FinishReason.STOP
    assert done.routed_experts.ravel().tolist() == [100, 101, 102, 103, 4]


@pytest.mark.parametrize("finish", ["abort", "length"])
def test_a_sample_that_is_over_is_asked_for_once_and_cut_when_it_comes_back(finish):
    mine, sent = samples(stream=True), flight()
    mine.sent(sent)
    mine.heard(sent, answer(9, 11))
    mine.heard(sent, answer(8, 9))
    assert mine.take_surplus() == ["r"]
    assert mine.take_surplus() == []
    assert mine.peek({KEY}) == []
    mine.heard(sent, answer(12, finish=finish, weight_versions=spans(5)))
    (done,) = mine.take_finished()

    assert (done.tokens.tolist(), done.finish_reason) == ([4, 8, 9], FinishReason.STOP)
    assert mine.waiting == {}
