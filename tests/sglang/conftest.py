"""Fixtures of the tests with a real SGLang on the CPU; `make sglang-env` makes what they need."""

from pathlib import Path

import pytest
from loop_run import LoopRunner
from sglang_bench import SglangBench
from sglang_site import interpreter


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(nothing_is_left_behind):
    """Hold every module to it."""


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that runs SGLang."""
    return str(interpreter())


@pytest.fixture
def run_loop(tmp_path, tiny_model) -> LoopRunner:
    """Run the loop on the tiny model, in a folder of its own each time."""
    return LoopRunner(tmp_path, tiny_model)


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory) -> Path:
    """A folder with a random Qwen3 of 2 layers with 8 experts, 2 of them a token, in float32."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    folder = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(
        vocab_size=103,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.3,  # far from uniform, so that a wrong expert shows
        tie_word_embeddings=False,
        pad_token_id=2,
        eos_token_id=2,
    )
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def make_bench(tmp_path_factory):
    """Make a server for the tests of a module; see `SglangBench`."""
    benches = []

    def make(**server) -> SglangBench:
        benches.append(SglangBench(interpreter(), tmp_path_factory.mktemp("sglang"), **server))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
