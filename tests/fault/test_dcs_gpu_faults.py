"""The GPU routes under fire, with GPUs made of files; tests/gpu/test_gpu_dcs.py plays the same on real ones."""

import gpu_scenes as scenes
import pytest
from fake_gpus import left_behind

from relax_actor.faults import Fault

pytestmark = pytest.mark.fault


@pytest.fixture
def stage(tmp_path):
    """Where GPUs are files, of which none may be left."""
    root = tmp_path / "gpus"
    root.mkdir()
    kind = f"fake:{root}"
    yield {name: (kind, {}) for name in ("trainer", "store", "replica")}
    assert left_behind(root) == []


def test_a_version_arrives_bit_for_bit_by_every_route(tmp_path, stage):
    with scenes.play(tmp_path, stage) as scene:
        scenes.every_route_is_bit_exact(scene)


def test_without_a_snapshot_the_other_routes_work(tmp_path, stage):
    with scenes.play(tmp_path, stage, trainer={"buffers": 0}) as scene:
        scenes.without_a_snapshot_the_other_routes_work(scene)


def test_a_bucket_larger_than_a_slot_goes_through_in_pieces(tmp_path, stage):
    with scenes.play(tmp_path, stage, store={"slot_bytes": 4096}) as scene:
        scenes.every_route_is_bit_exact(scene)


def test_a_device_is_known_by_its_uuid(tmp_path, stage):
    with scenes.play(tmp_path, stage) as scene:
        scenes.devices_are_known_by_uuid(scene)


def test_a_flipped_byte_is_refused_by_name(tmp_path, stage):
    with scenes.play(tmp_path, stage) as scene:
        scenes.a_flipped_byte_is_refused_by_name(scene)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_store_killed_in_mid_fill_costs_a_route(tmp_path, stage, nth):
    with scenes.play(tmp_path, stage, faults=[Fault(actor="store", point="stage_chunk", nth=nth)]) as scene:
        scenes.a_store_killed_in_mid_fill_costs_a_route(scene)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_replica_killed_in_mid_install_costs_nobody_else(tmp_path, stage, nth):
    fault = Fault(actor="replica", point="install_bucket", nth=nth)
    with scenes.play(tmp_path, stage, faults=[fault]) as scene:
        scenes.a_replica_killed_in_mid_install_costs_nobody_else(scene)


def test_a_stopped_trainer_is_not_needed(tmp_path, stage):
    with scenes.play(tmp_path, stage) as scene:
        scenes.a_stopped_trainer_is_not_needed(scene)


def test_a_dead_trainers_snapshot_is_gone(tmp_path, stage):
    with scenes.play(tmp_path, stage) as scene:
        scenes.a_dead_trainers_snapshot_is_gone_and_the_host_still_has_the_version(scene)


def test_a_stopped_store_is_given_up(tmp_path, stage):
    with scenes.play(tmp_path, stage) as scene:
        scenes.a_stopped_store_is_given_up(scene)


def test_many_replicas_install_at_once(tmp_path, stage):
    with scenes.play(tmp_path, stage, replicas=3) as scene:
        scenes.many_replicas_install_at_once(scene)


@pytest.mark.parametrize("point", ["publish_bucket", "publish_manifest", "publish_latest"])
def test_a_trainer_killed_while_it_publishes_leaves_no_half_version(tmp_path, stage, point):
    with scenes.play(tmp_path, stage, faults=[Fault(actor="trainer", point=point)]) as scene:
        scenes.a_trainer_killed_while_it_publishes_leaves_no_half_version(scene)
