"""`update_mode = "retract"` with a real SGLang: requests cross an update, each token knows its version."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.sglang.updating import UpdateMode, update_mode_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

CLOSE, TOKENS, CONTEXT, VOCABULARY = 2e-5, 300, 512, 103
PROMPT = tuple(4 + (7 * place) % 90 for place in range(100))


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench(update_mode="retract")


@pytest.fixture(scope="module")
def models(tiny_model):
    """Two policies that log-probs tell apart."""
    old = AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32).eval()
    new = AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in new.parameters():
            weight.add_(0.3 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))
    return old, new


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def engine(bench, tiny_model, request):
    engine = bench.engine(tiny_model.path, vocabulary=VOCABULARY, context=CONTEXT, stream=request.param)
    if update_mode_of("auto", engine.capabilities) is UpdateMode.ABORT or not engine.capabilities.retract:
        pytest.skip("this SGLang cannot flush under a retract pause")
    return engine


def weights(model):
    return list(model.state_dict().items())


def requests(count, tokens=TOKENS, group=0):
    params = SamplingParams(max_new_tokens=tokens)
    return [
        Request(group_id=group, sample_index=index, prompt=PROMPT, params=params) for index in range(count)
    ]


def finished(engine):
    done, end = [], time.monotonic() + 90
    while engine.in_flight and time.monotonic() < end:
        done += engine.step()
        time.sleep(0.002)
    assert not engine.in_flight
    return done


def wait_until_under_way(engine):
    """Wait for the end of a short sample that was sent later than those that are to be in their middle."""
    engine.submit(requests(1, tokens=12, group=99))
    end = time.monotonic() + 60
    while not engine.step() and time.monotonic() < end:
        time.sleep(0.002)


@torch.inference_mode()
def logprobs(model, completion):
    prompt, tokens = completion.request.prompt, torch.from_numpy(completion.tokens).long()
    ids = torch.cat([torch.tensor(prompt), tokens])[None]
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].numpy()


def test_every_token_after_a_retraction_is_of_the_version_it_says(engine, models):
    """All keys and values are the new policy's: a plain forward of each version gives its log-probs."""
    engine.install(0, weights(models[0]))
    engine.submit(requests(6))
    wait_until_under_way(engine)

    engine.install(1, weights(models[1]))

    done = finished(engine)
    assert len(done) == 6
    for each in done:
        border = int((each.versions == 0).sum())
        assert 1 < border < TOKENS, "it was in its middle"
        assert each.versions.tolist() == [0] * border + [1] * (TOKENS - border)
        old, new = (logprobs(model, each) for model in models)
        assert np.abs(each.logprobs[:border] - old[:border]).max() < CLOSE
        assert np.abs(each.logprobs[border:] - new[border:]).max() < CLOSE
        assert np.abs(new - old)[[border - 1, border]].min() > CLOSE, "one token more or less would show"


def test_samples_of_a_prompt_read_it_out_of_the_cache_where_one_was_there_before(engine, models):
    """Affinity is for this: on a replica that has had the prompt only what is new of it is computed."""
    engine.install(0, weights(models[0]))
    engine.submit(requests(1, tokens=4))
    finished(engine)
    first = engine._generation.prompts_read()
    assert (first.tokens, first.cached) == (len(PROMPT), 0)

    engine.submit(requests(7, tokens=4, group=1))
    finished(engine)
    rest = engine._generation.prompts_read()
    assert rest.tokens == 7 * len(PROMPT)
    assert rest.cached >= 0.95 * rest.tokens

    engine.install(1, weights(models[1]))
    engine.submit(requests(1, tokens=4, group=2))
    finished(engine)
    assert engine._generation.prompts_read().cached == 0, "never of older weights"
