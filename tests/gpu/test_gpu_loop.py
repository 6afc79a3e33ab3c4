"""The whole loop with trainer and rollouts on GPUs: weights take the GPU routes, also after deaths."""

import pytest
from loop_run import LoopRunner

from relax_actor.faults import Fault


@pytest.fixture
def run_loop(tmp_path, tiny_model):
    return LoopRunner(tmp_path, tiny_model)


@pytest.mark.gpu(2)
@pytest.mark.timeout(200)
def test_rollouts_on_gpus_are_brought_up_to_date_over_nvlink(run_loop):
    done = run_loop(
        plan=[Fault(actor="rollout/0", point="install_bucket", nth=3)],
        rollout={"engine": "transformers", "device": "cuda"},
        train={"device": "cuda"},
        run={"steps": 6},
    )
    assert done.outcome.exit_code == 0, done.log
    published = done.of("policy_published")
    assert len(published) >= 7
    assert all(event["is_on_gpu"] for event in published)
    routes = {event["route"] for event in done.of("policy_installed")}
    assert "cuda_ipc" in routes, done.log
    assert done.killed.count("rollout/0") == 1
    assert not [
        event for event in done.of("child_exited") if event["child"] == "trainer" and "SIG" in event["reason"]
    ]
