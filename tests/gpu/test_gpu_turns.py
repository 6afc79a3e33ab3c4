"""Trainer and rollout have one GPU in turns: what one side has, the other one does not hold meanwhile."""

import pytest
import torch
from loop_run import LoopRunner, kills

from relax_actor.trainers.torch_offload import Offload

MIB = 1 << 20


@pytest.mark.gpu(1)
def test_offloaded_tensors_leave_the_gpu_and_come_back_the_same():
    tensors = [torch.arange(16 * MIB, device="cuda:0", dtype=torch.float32) for _ in range(4)]
    offload = Offload(lambda: tensors, "cuda:0")
    before = torch.cuda.mem_get_info(0)[0]
    offload.offload()
    assert torch.cuda.mem_get_info(0)[0] - before >= 240 * MIB
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors)
    offload.onload()
    assert all(tensor.device.type == "cuda" and int(tensor[12345]) == 12345 for tensor in tensors)


@pytest.mark.gpu(1)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("killed", ["rollout/0", "trainer"])
def test_turns_on_one_gpu_survive_a_kill_of_either_side(tmp_path, tiny_model, killed):
    where = "asleep" if killed == "rollout/0" else "turn_taken"
    run = LoopRunner(tmp_path, tiny_model)(
        plan=kills(killed, (where, 2)),
        run={"steps": 5, "max_staleness": 0, "mode": "async_on_policy", "colocate": True},
        rollout={"engine": "transformers", "device": "cuda:0", "replicas": 1},
        train={"device": "cuda:0", "checkpoint_every": 1},
    )
    assert run.outcome.exit_code == 0, run.log
    assert [event["step"] for event in run.history] == [1, 2, 3, 4, 5]
    assert run.killed == [killed]
    assert all(event["frees_memory"] for event in run.of("turn_ended") if "frees_memory" in event)
