"""The GPU routes on real GPUs: bit-exact, by UUID, under fire; the scenes of tests/support/gpu_scenes.py.

With one GPU, trainer and replica share it; with two, each sees its own as number 0.
"""

import contextlib
import os
import subprocess
import sys
import time

import gpu_scenes as scenes
import pytest

from relax_actor.faults import Fault

SLACK_BYTES = 256 << 20
MEDIUM = (
    ("embed.weight", (4099, 1031)),
    ("layers.0.q.weight", (1024, 1024)),
    ("layers.0.q.bias", (63,)),
    ("layers.0.scale", ()),
    ("layers.0.nothing", (0, 7)),
    ("layers.0.experts.11.up.weight", (3, 5, 7)),
    ("layers.1.up.weight", (3001, 517)),
    ("head.weight", (10031, 33)),
)


def gpu_memory_used():
    import pynvml

    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    return [
        pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used
        for index in range(count)
    ]


@contextlib.contextmanager
def play(folder, *, gpus, **settings):
    """Start a scene on real GPUs, of whose memory nothing may be left."""
    before = gpu_memory_used()
    stage = {
        "trainer": ("cuda", {"CUDA_VISIBLE_DEVICES": "0"}),
        "store": ("cuda", {}),
        "replica": ("cuda", {"CUDA_VISIBLE_DEVICES": str(gpus - 1)}),
    }
    with scenes.play(folder, stage, **settings) as scene:
        yield scene
    deadline = time.monotonic() + 20
    while any(now > was + SLACK_BYTES for now, was in zip(gpu_memory_used(), before, strict=True)):
        assert time.monotonic() < deadline, f"GPU memory was {before} and is {gpu_memory_used()}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    with play(tmp_path_factory.mktemp("calm"), gpus=2) as scene:
        yield scene


@pytest.mark.gpu(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("scene", scenes.CALM, ids=lambda scene: scene.__name__)
def test_in_calm(request, scene):
    scene(request.getfixturevalue("calm"))


@pytest.mark.gpu(1)
@pytest.mark.timeout(120)
def test_on_one_gpu_larger_tensors_go_through_in_pieces(tmp_path):
    with play(
        tmp_path,
        gpus=1,
        trainer={"shapes": MEDIUM, "bucket_bytes": 2 << 20},
        store={"slot_bytes": 1 << 20},
        replica={"shapes": MEDIUM},
    ) as scene:
        scenes.every_route_is_bit_exact(scene, MEDIUM)


@pytest.mark.gpu(2)
@pytest.mark.timeout(120)
def test_a_store_killed_in_mid_fill_costs_a_route(tmp_path):
    with play(tmp_path, gpus=2, faults=[Fault(actor="store", point="stage_chunk", nth=2)]) as scene:
        scenes.a_store_killed_in_mid_fill_costs_a_route(scene)


@pytest.mark.gpu(2)
@pytest.mark.timeout(120)
def test_a_replica_killed_in_mid_install_costs_nobody_else(tmp_path):
    with play(tmp_path, gpus=2, faults=[Fault(actor="replica", point="install_bucket", nth=2)]) as scene:
        scenes.a_replica_killed_in_mid_install_costs_nobody_else(scene)


@pytest.mark.gpu(1)
@pytest.mark.timeout(120)
def test_without_a_snapshot_the_other_routes_work(tmp_path):
    with play(tmp_path, gpus=1, trainer={"buffers": 0}) as scene:
        scenes.without_a_snapshot_the_other_routes_work(scene)


COMPARED = """
import torch

from relax_actor.dcs.cuda.fold import fold

for nbytes in (1, 7, 8, 63, 4096, (1 << 22) + 5, (1 << 19) * 3):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert int(fold(data)) == int(fold(data.cuda())), nbytes
value = torch.randn(1 << 20) * 1e-3
assert torch.equal(value.to(torch.bfloat16), value.cuda().to(torch.bfloat16).cpu())
"""


@pytest.mark.gpu(1)
@pytest.mark.timeout(120)
def test_a_cast_on_the_gpu_and_a_fold_give_what_the_cpu_gives():
    """In a process of its own: this one's GPU memory is what the other tests look at."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", COMPARED], env=env, check=True)
