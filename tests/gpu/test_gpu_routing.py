"""Routing replay on a GPU: experts recorded by its engine, sent ahead to its trainer."""

import dataclasses
import shutil

import pytest
import torch
from loop_run import LoopRunner, assert_kept_its_promises

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.fixture
def run_moe(tmp_path, tiny_model) -> LoopRunner:
    """Run the loop on a tiny Qwen3 with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path / "moe"
    shutil.copytree(tiny_model.path, folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig.from_pretrained(folder, **EXPERTS, initializer_range=0.2)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return LoopRunner(tmp_path, dataclasses.replace(tiny_model, path=folder))


@pytest.mark.gpu(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", ["async", "sync", "check"])
def test_experts_go_round_the_loop_on_a_gpu(run_moe, mode):
    run = run_moe(
        run={"steps": 4, "max_staleness": 0, "mode": "async_on_policy"},
        model={"dtype": "float32"},
        rollout={"engine": "transformers", "device": "cuda"},
        train={"device": "cuda", "use_r3": True, "r3_replay_mode": mode, "r3_tolerance_frac": 0.02},
    )
    assert_kept_its_promises(run)
    assert all(step["mismatch_abs"] < 1e-3 for step in run.history)
