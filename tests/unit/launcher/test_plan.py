"""A plan says what would be started and needed, and is written where it is asked for."""

import json

import msgspec
import pytest

from launcher.plan import make_plan, plan_json, render, write_plan
from launcher.runfolder import RunFolder
from launcher.settings import load


@pytest.fixture
def plan(config):
    rollout = msgspec.structs.replace(config.rollout, replicas=2)
    reward = msgspec.structs.replace(config.reward, replicas=2, workers=3)
    return make_plan(msgspec.structs.replace(config, rollout=rollout, reward=reward), rows=4)


def test_the_staleness_bound_is_said_in_samples(plan):
    assert plan.staleness_window_groups == 32
    assert plan.staleness_bound_samples == 256


def test_over_sampled_groups_are_a_part_of_it(config):
    queue = msgspec.structs.replace(config.queue, over_sampling=1.1)
    assert make_plan(msgspec.structs.replace(config, queue=queue), rows=4).staleness_window_groups == 34


def test_every_actor_and_its_processes_are_listed(plan):
    assert [actor.names for actor in plan.actors] == [
        ["queue"],
        ["prompts"],
        ["reward/0", "reward/1"],
        ["rollout/0", "rollout/1"],
        ["trainer"],
    ]
    assert render(plan).startswith("actors (13 processes")


def test_one_rollout_is_numbered_too(config):
    names = [name for actor in make_plan(config, rows=1).actors for name in actor.names]

    assert names == ["queue", "prompts", "reward", "rollout/0", "trainer"]


def test_a_plan_fits_80_columns(plan):
    assert max(map(len, render(plan).splitlines())) <= 80


def test_a_plan_is_written_with_the_configuration_it_came_from(plan, config, tmp_path):
    folder = RunFolder.create(str(tmp_path / "run"), name="x")

    write_plan(plan, config, folder)

    assert json.loads(folder.plan.read_text()) == json.loads(plan_json(plan))
    assert load(folder.resolved) == msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, dir=str(folder.path / config.run.dir))
    )
