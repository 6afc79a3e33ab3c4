"""Stop strings with a real SGLang, which looks for them by itself; and a run whose samples they end."""

import json
import time

import pytest
from transformers import AutoModelForCausalLM

from relax_actor.data.template import text_of
from relax_actor.engines.base import Prefix, Request, SamplingParams
from relax_actor.engines.running import RunningSample
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.protocol import FinishReason

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

CONTEXT, VOCABULARY, MOST = 512, 103, 200
LETTERS = "abcdefghijklmnopqrstuvwxyz"
STRINGS = [*("a" + letter for letter in LETTERS), "bb", "cc", "dd", "ee", "ff", "gg"]  # as many as may be
WORDS = ("user\n", "assistant\n")  # tokens of several letters
PROMPT = tuple(range(4, 24))


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench(reads_text=True)


@pytest.fixture(scope="module")
def weights(tiny_model):
    return list(AutoModelForCausalLM.from_pretrained(tiny_model.path).state_dict().items())


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def engine(bench, tiny_model, weights, request):
    engine = bench.engine(tiny_model.path, vocabulary=VOCABULARY, context=CONTEXT, stream=request.param)
    engine.install(0, weights)
    return engine


@pytest.fixture(scope="module")
def strings(tiny_model):
    return StopStrings(STRINGS, text_of(tiny_model.path))


def request(strings, sample=0, prefix=None, most=MOST):
    params = SamplingParams(max_new_tokens=most, stop_strings=strings)
    more = {"prefix": prefix} if prefix else {}
    return Request(group_id=0, sample_index=sample, prompt=PROMPT, params=params, **more)


def drain(engine):
    done, end = [], time.monotonic() + 90
    while engine.in_flight:
        done += engine.step()
        assert time.monotonic() < end
        time.sleep(0.002)
    assert engine.refused() == []
    return done


def test_the_server_stops_with_the_token_that_makes_a_string_whole(engine, strings, monkeypatch):
    too_much = []
    cut = RunningSample.cut
    monkeypatch.setattr(
        RunningSample,
        "cut",
        lambda self, length: (too_much.append(len(self.tokens) - length), cut(self, length)),
    )
    for first in (0, 16):
        engine.submit([request(strings, sample=first + index) for index in range(16)])
        for done in drain(engine):
            tokens = done.tokens.tolist()
            if done.finish_reason is FinishReason.STOP and tokens[-1] != 2:
                assert strings.end(tokens) == len(tokens) == len(done.logprobs)
            else:
                assert strings.end(tokens) is None
    assert len(too_much) > 2  # that were ended by a string: one in three
    assert not any(too_much)


def test_a_string_that_begins_in_a_prefix_ends_a_sample(engine, strings, tiny_model):
    """SGLang does not see it; every fourth of these goes on with a letter, which is a string's second."""
    letter = text_of(tiny_model.path)
    (a,) = [token for token in range(VOCABULARY) if letter([token]) == "a"]
    prefix = Prefix(tokens=(a,), logprobs=(-1.0,), versions=(0,))
    samples = []
    for first in range(0, 64, 16):
        engine.submit([request(strings, first + index, prefix, most=24) for index in range(16)])
        samples += [done.tokens.tolist() for done in drain(engine)]

    assert [tokens for tokens in samples if len(tokens) == 2 and tokens[1] != 2]
    for tokens in samples:
        assert strings.end(tokens) in {None, len(tokens)}


def test_a_run_with_stop_strings(run_loop, sglang_python, tmp_path, monkeypatch):
    log = tmp_path / "samples.jsonl"
    monkeypatch.setenv("REWARD_LOG", str(log))
    run = run_loop(
        run={"steps": 2},
        rollout={
            "engine": "sglang",
            "sglang_python": sglang_python,
            "replicas": 1,
            "max_new_tokens": MOST,
            "stop": tuple(STRINGS),
        },
        reward={"function": "user_rewards:vowels"},
    )
    assert run.outcome.exit_code == 0, run.log
    texts = [json.loads(line)["response"] for line in log.read_text().splitlines()]
    # A reward sees no special tokens, so where a text ends is all that can be told: every second ends so.
    ends = [text[-len("?assistant\n") :] if text.endswith(WORDS) else text[-2:] for text in texts]
    assert sum(any(string in end for string in STRINGS) for end in ends) > len(texts) // 8
