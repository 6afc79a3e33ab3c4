"""Routed experts go on with their samples, wherever a rollout dies: a model with experts, on the CPU."""

import dataclasses
import shutil

import pytest
import torch
from loop_faults import Rendezvous, standstill
from loop_run import LoopRunner, assert_kept_its_promises, assert_trainer_went_on, kills

from relax_actor.transfer_queue.events import ChunkPut, Submitted

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SYNCHRONOUS = {"max_staleness": 0, "mode": "async_on_policy", "steps": 6}
REAL = {"engine": "transformers", "deterministic": True, "max_new_tokens": 8, "chunk_tokens": 2}
R3 = {"use_r3": True, "learning_rate": 1e-2, "r3_replay_mode": "check", "r3_tolerance_frac": 0.0}


@pytest.fixture
def run_moe(tmp_path, tiny_model) -> LoopRunner:
    """Run the loop on a tiny Qwen3 with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path / "moe"
    shutil.copytree(tiny_model.path, folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig.from_pretrained(folder, **EXPERTS, initializer_range=0.2, mlp_only_layers=[0])
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return LoopRunner(tmp_path, dataclasses.replace(tiny_model, path=folder))


def assert_routes_fit(run) -> None:
    """Check that every sample and every chunk has one row of routes a token that was fed."""
    prompts = {event.group.group_id: event.group for event in run.journal if isinstance(event, Submitted)}
    rows = run.samples_put
    rows += [event.chunk for event in run.journal if isinstance(event, ChunkPut)]
    assert rows
    for row in rows:
        tokens = prompts[row.group_id].tokens.shape[0] + row.tokens.shape[0] - 1
        assert (row.routed_experts.dtype, row.routed_experts.shape) == ("uint8", (tokens, 1, 2))


def test_routes_of_a_sample_go_on_after_its_rollout_has_died(run_moe):
    """I6 with R3: the same weights to the bit, and routes that the trainer itself would have chosen."""
    quiet = run_moe(run=SYNCHRONOUS, rollout=REAL | {"chunk_tokens": 0}, train=R3)
    plan = [*kills("rollout/0", ("chunk_sent", 3)), *kills("rollout/1", ("chunk_sent", 2), "chunk_written")]
    stops = [standstill(steps) for steps in range(1, 6)]  # or one may do it all while the other one starts
    run = run_moe(plan=plan + stops, on_tick=Rendezvous(), run=SYNCHRONOUS, rollout=REAL, train=R3)

    assert sorted(run.killed) == sorted(fault.actor for fault in plan), run.log
    for each in (quiet, run):
        assert_kept_its_promises(each)
        assert_trainer_went_on(each)
        assert_routes_fit(each)
        assert all(step["mismatch_abs"] < 1e-5 for step in each.history)
        assert all(step["routing_mismatch_frac"] == 0 for step in each.history if not step["skipped"])
        assert not each.of("logprob_mismatch")
    continued = run.samples_put
    assert any(sample.continued_tokens for sample in continued)
    assert run.weights == quiet.weights


def test_routes_survive_the_queue_the_trainer_and_too_little_memory(run_moe):
    """They lie in files beyond the budget, and a restarted trainer reads them there; versions mix."""
    plan = [*kills("queue", ("queue_committed", 14)), *kills("trainer", ("trained", 2))]
    run = run_moe(
        plan=plan,
        run={"steps": 4},
        rollout=REAL | {"deterministic": False},
        train=R3 | {"r3_replay_mode": "sync", "checkpoint_every": 1},
        queue={"max_size_gb": 1e-6, "max_attempts": 100},
    )

    assert run.outcome.exit_code == 0, run.log
    assert sorted(run.killed) == ["queue", "trainer"], run.log
    assert run.of("rows_spilled")
    assert_routes_fit(run)
    assert [event["step"] for event in run.history] == [1, 2, 3, 4]


def test_an_alarm_tells_of_a_trainer_that_is_far_from_its_rollouts(run_loop):
    """Scripted samples have log-probs that no model gives them."""
    run = run_loop(run={"steps": 3})
    alarm = run.of("logprob_mismatch")[0]
    assert alarm["mismatch_abs"] > run.config.train.mismatch_alarm
    step = next(event for event in run.history if event["step"] == alarm["step"])
    assert step["mismatch_abs"] == alarm["mismatch_abs"]
    assert step["mismatch_by_version"] == alarm["mismatch_by_version"] != {}
    assert sum(part["tokens"] for part in step["mismatch_by_version"].values()) > 0
