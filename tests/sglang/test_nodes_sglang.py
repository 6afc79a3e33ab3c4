"""A real SGLang server over two nodes, both here: a version reaches both, and neither outlives the other."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.sglang.engine import SglangEngine
from relax_actor.engines.sglang.errors import ServerGoneError
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.server import Server, held_port
from relax_actor.engines.sglang.settings import ServerSettings, meeting_address
from relax_actor.engines.sglang.weights import Updater, UpdateSettings, WeightPlacement

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

CLOSE = 1e-5  # of log-probs in float32
NOTICED_S = 90.0


class Nodes:
    """An engine whose server has its second half in another session, as on another host.

    Args:
        model: a folder of a model.
        python: of SGLang.
        logs: a folder.
    """

    def __init__(self, model: Path, python: str, logs: Path) -> None:
        self._meeting = held_port()
        address = meeting_address("127.0.0.1", self._meeting.getsockname()[1])
        near, far = (
            msgspec.structs.replace(_settings(model, python), nodes=2, node=node, meeting=address)
            for node in range(2)
        )
        self.far = Server(far, logs / "far.log")
        self.engine = _engine(near, WeightPlacement(ranks=2, hosts=2), logs / "near.log", model)

    def close(self) -> None:
        self.engine.close()
        self.far.kill()
        self._meeting.close()


@pytest.fixture
def nodes(tiny_model, sglang_python, tmp_path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        made = Nodes(tiny_model.path, sglang_python, tmp_path)
        stack.callback(made.close)
        yield made


def test_what_is_installed_over_two_nodes_is_what_both_sample_with(nodes, tiny_model):
    """By the broadcast, the only route to a rank on another host; twice, since a version follows another."""
    for version in range(2):
        weights = _weights(tiny_model.path, seed=version)
        nodes.engine.install(version, weights.items())

        done = _sampled(nodes.engine, [_request(index, version) for index in range(4)])

        assert len(done) == 4
        model = _model(tiny_model.path, weights)
        for completion in done:
            assert set(completion.versions) == {version}
            np.testing.assert_allclose(completion.logprobs, _logprobs(model, completion), atol=CLOSE)


def test_two_nodes_sample_what_one_node_with_as_many_ranks_does(nodes, tiny_model, sglang_python, tmp_path):
    """Token by token, where the likeliest is taken; each log-prob within rounding."""
    weights = _weights(tiny_model.path, seed=5)
    requests = [_request(index, 0, greedy=True) for index in range(8)]
    nodes.engine.install(0, weights.items())
    spread = _by_prompt(_sampled(nodes.engine, requests))
    nodes.close()
    placement = WeightPlacement(ranks=2)
    one = _engine(_settings(tiny_model.path, sglang_python), placement, tmp_path / "one.log", tiny_model.path)
    try:
        one.install(0, weights.items())
        together = _by_prompt(_sampled(one, requests))
    finally:
        one.close()

    assert len(spread) == len(together) == 8
    for prompt, (tokens, logprobs) in spread.items():
        assert together[prompt][0] == tokens
        np.testing.assert_allclose(logprobs, together[prompt][1], atol=CLOSE)


def test_the_end_of_the_far_node_ends_the_near_one(nodes, tiny_model):
    """The replica is one: what is left of it would wait for ever."""
    nodes.engine.install(0, _weights(tiny_model.path, seed=0).items())
    nodes.engine.submit([_request(0, 0, tokens=400)])

    os.killpg(nodes.far.pid, signal.SIGKILL)
    with pytest.raises(ServerGoneError, match="scheduler"):
        _sampled(nodes.engine, [], until_s=NOTICED_S)


def test_the_end_of_the_near_node_ends_the_far_one(nodes):
    """Hence no half of an older server is there when the next one starts."""
    ended = threading.Event()
    nodes.far.watch(lambda _what: ended.set())

    nodes.engine.close()

    assert ended.wait(NOTICED_S)


def _settings(model: Path, python: str) -> ServerSettings:
    return ServerSettings(
        model=str(model), python=python, context_tokens=512, slots=16, dtype="float32", tp=2
    )


def _engine(settings: ServerSettings, placement: WeightPlacement, log: Path, model: Path) -> SglangEngine:
    return SglangEngine(
        settings,
        GenerationSettings(seed=0),
        lambda client, found: Updater(
            client, found, UpdateSettings(bucket_bytes=40_000), placement=placement
        ),
        vocabulary=AutoModelForCausalLM.from_pretrained(model).config.vocab_size,
        log=log,
    )


def _weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def _model(folder: Path, weights: dict[str, torch.Tensor]) -> AutoModelForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    return model.eval()


def _request(group: int, version: int, tokens: int = 24, *, greedy: bool = False) -> Request:
    params = SamplingParams(max_new_tokens=tokens, top_k=1 if greedy else 0)
    prompt = (1, *range(4 + group, 16 + group))
    return Request(group_id=100 * version + group, sample_index=0, prompt=prompt, params=params)


def _sampled(engine: SglangEngine, requests: list[Request], until_s: float = 60.0) -> list:
    """Sample until nothing is in flight; return what finished."""
    if requests:
        engine.submit(requests)
    done, end = [], time.monotonic() + until_s
    while engine.in_flight and time.monotonic() < end:
        done += engine.step()
        time.sleep(0.002)
    return done


def _by_prompt(done: list) -> dict:
    return {each.request.prompt: (each.tokens.tolist(), each.logprobs) for each in done}


@torch.inference_mode()
def _logprobs(model: AutoModelForCausalLM, completion) -> np.ndarray:
    prompt, tokens = completion.request.prompt, completion.tokens.tolist()
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    every = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return every.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
