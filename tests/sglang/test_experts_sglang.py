"""A mixture of experts in a real SGLang: log-probs and routed experts are those of transformers."""

import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from relax_actor.engines.base import Request, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

LAYERS, TOP_K = 2, 2


@pytest.fixture(scope="module")
def model(tiny_moe):
    return AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench(routed_experts=True)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def engine(bench, tiny_moe, request):
    engine = bench.engine(
        tiny_moe, vocabulary=103, context=512, stream=request.param, expert_shape=(LAYERS, TOP_K)
    )
    engine.install(0, load_file(tiny_moe / "model.safetensors").items())
    return engine


def sampled(engine, requests):
    """Sample all of them; return the completions by key."""
    engine.submit(requests)
    done, end = {}, time.monotonic() + 60
    while engine.in_flight and time.monotonic() < end:
        done.update({each.request.key: each for each in engine.step()})
        time.sleep(0.002)
    return done


@torch.inference_mode()
def reference(model, completion):
    """Return log-probs [n] and experts [prompt + n - 1, layers, top_k], each row sorted."""
    prompt, tokens = completion.request.prompt, completion.tokens.tolist()
    ids = torch.tensor([[*prompt, *tokens]])
    out = model(input_ids=ids, output_router_logits=True, use_cache=False)
    logprobs = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = [logits.topk(TOP_K, -1).indices for logits in out.router_logits]
    experts = torch.stack(chosen, 1)[:-1].sort(-1).values
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy(), experts.numpy()


def test_every_token_says_which_experts_it_went_through(engine, model):
    """Prompts with a common beginning included, which the server computes once."""
    prompts = [(5, 6, 7), (5, 6, 7, *range(10, 40)), (5, 6, 7, *range(10, 40), 50)]
    requests = [
        Request(group_id=g, sample_index=0, prompt=prompt, params=SamplingParams(max_new_tokens=12))
        for g, prompt in enumerate(prompts)
    ]
    done = sampled(engine, requests)

    assert len(done) == 3
    for completion in done.values():
        logprobs, experts = reference(model, completion)
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4, rtol=0)
        assert completion.routed_experts.shape == experts.shape
        assert (np.sort(completion.routed_experts, -1) == experts).all()
