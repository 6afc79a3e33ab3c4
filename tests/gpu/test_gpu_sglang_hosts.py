"""A replica of a real SGLang server over two hosts: here two node agents of one machine, each with a GPU.

Where SGLang is comes from the environment; see `sglang_scenes`. The trainer is on the CPU: both GPUs are the
replica's.
"""

import pytest
import sglang_scenes
from loop_hosts import loop_hosts
from loop_run import LoopRunner
from spread_replicas import Strikes, assert_nothing_was_lost

from relax_actor.placement import Placement, Seat

DEADLINE_S = 540.0


@pytest.mark.gpu(2)
@pytest.mark.timeout(600)
def test_a_replica_over_two_hosts_starts_again_whole_on_gpus(tmp_path, tiny_model):
    """I2, I3, I4, I5, I7, I8: the rank on the other host is killed; NCCL would wait for it."""
    if not sglang_scenes.python():
        pytest.skip("needs SGLang: RELAX_ACTOR_SGLANG_PYTHON")
    folder = tmp_path / "model"
    sglang_scenes.model_folder(folder, "0.6b", context=1024)

    class Model:
        path, rows = folder, staticmethod(tiny_model.rows)

    strikes = Strikes("far scheduler", "near")
    with loop_hosts(2) as hosts:
        seats = (
            Seat(actor="rollout/0", host="a", gpus=("0",)),
            Seat(actor="part/0", host="b", gpus=("1",)),
        )
        run = LoopRunner(tmp_path, Model)(
            model={"dtype": "bfloat16"},
            rollout=sglang_scenes.server_options()
            | {"replicas": 1, "tensor_parallel": 2, "hosts_per_replica": 2, "max_new_tokens": 64},
            train={"device": "cpu", "learning_rate": 1e-6},
            run={"steps": 4},
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(Placement(hosts=tuple(hosts.names), seats=seats)),
        )
        assert_nothing_was_lost(run, hosts)

    assert strikes.waiting == []
    assert {event["route"] for event in run.of("engine_updated")} == {"group"}
    assert {(event["tp"], event["device"]) for event in run.of("engine_started")} == {(2, "cuda")}
    assert len(run.of("engine_started")) == 3
