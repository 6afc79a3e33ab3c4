"""The GPU routes under fire, with GPUs made of files; tests/gpu/test_gpu_dcs.py has the real ones."""

import contextlib

import gpu_scenes as scenes
import pytest
from fake_gpus import left_behind

from relax_actor.faults import Fault

pytestmark = pytest.mark.fault


@contextlib.contextmanager
def play(folder, **settings):
    """Start a scene where GPUs are files, of which none may be left."""
    root = folder / "gpus"
    root.mkdir()
    stage = {name: (f"fake:{root}", {}) for name in ("trainer", "store", "replica")}
    with scenes.play(folder, stage, **settings) as scene:
        yield scene
    assert left_behind(root) == []


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    with play(tmp_path_factory.mktemp("calm")) as scene:
        yield scene


@pytest.mark.parametrize("scene", scenes.CALM, ids=lambda scene: scene.__name__)
def test_in_calm(calm, scene):
    scene(calm)


def test_a_bucket_larger_than_a_slot_goes_through_in_pieces(tmp_path):
    with play(tmp_path, store={"slot_bytes": 4096}, replicas=3) as scene:
        scenes.every_route_is_bit_exact(scene)
        scenes.many_replicas_install_at_once(scene)


def test_without_a_snapshot_the_other_routes_work(tmp_path):
    with play(tmp_path, trainer={"buffers": 0}) as scene:
        scenes.without_a_snapshot_the_other_routes_work(scene)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_store_killed_in_mid_fill_costs_a_route(tmp_path, nth):
    with play(tmp_path, faults=[Fault(actor="store", point="stage_chunk", nth=nth)]) as scene:
        scenes.a_store_killed_in_mid_fill_costs_a_route(scene)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_replica_killed_in_mid_install_costs_nobody_else(tmp_path, nth):
    with play(tmp_path, faults=[Fault(actor="replica", point="install_bucket", nth=nth)]) as scene:
        scenes.a_replica_killed_in_mid_install_costs_nobody_else(scene)


@pytest.mark.parametrize("point", ["publish_bucket", "publish_manifest", "publish_latest"])
def test_a_trainer_killed_while_it_publishes_leaves_no_half_version(tmp_path, point):
    with play(tmp_path, faults=[Fault(actor="trainer", point=point)]) as scene:
        scenes.a_trainer_killed_while_it_publishes_leaves_no_half_version(scene)
