"""A plan says what would be started and needed, and is written where it is asked for."""

import json
from types import MappingProxyType

import msgspec
import pytest

from launcher.asking import ask
from launcher.estimate import Estimate
from launcher.hostfile import parse
from launcher.hostplan import plan_hosts, render_hosts
from launcher.options import GpuOptions, LaunchOptions
from launcher.placing import needs_of, place, rooms
from launcher.plan import make_plan, plan_json, render, write_plan
from launcher.runfolder import RunFolder
from launcher.settings import load
from launcher.stalls import Needs


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


@pytest.fixture
def plan_of(config):
    """Plan a run over the hosts of a hostfile."""

    def make(text: str, *, replicas: int = 1, rollout=MappingProxyType({}), **words):
        rollout = msgspec.structs.replace(config.rollout, replicas=replicas, **rollout)
        changed = msgspec.structs.replace(config, rollout=rollout)
        there = rooms(parse(text), {})
        options = ask({"--hosts": "a"} | words, {}, has_srun=False)
        placement = place(needs_of(changed, there, GpuOptions()), there)
        return make_plan(changed, rows=4, options=options, rooms=there, placement=placement)

    return make


def test_hosts_and_places_are_shown_and_values_of_variables_hidden(plan_of):
    plan = plan_of(
        "node01 slots=4\nnode[02-03] slots=2\ngpu-a gpus=GPU-1,GPU-2 role=rollout\n[fd00::1]\n",
        replicas=8,
        **{"--env": ("TOKEN=secret",), "--port-range": "20000-20999", "--venv": "/venv", "--ifname": "ib0"},
    )

    text = render(plan)
    shown = text.partition("\n\nhosts")[2].partition("\n\nloop")[0]
    assert shown.splitlines() == [
        " (ssh, 5)",
        "  host         GPUs                memory  shared memory",
        "  node01       0-3                  4 MiB        2.0 GiB",
        "  node[02-03]  0-1                  4 MiB          6 KiB",
        "  gpu-a        GPU-1,GPU-2          2 MiB          6 KiB",
        "  fd00--1      asked at the start   2 MiB          6 KiB",
        "  variables    TOKEN=***",
        "  python       /venv/bin/python",
        "  folder       as here",
        "  network      ib0, ports 20000-20999",
        "",
        "placement",
        "  host         GPUs   actors",
        "  node01              queue,prompts,reward,store-0",
        "  node01       1-2    rollout/[0-1]",
        "  node01       0      trainer",
        "  node[02-03]  0-1    rollout/[2-5]",
        "  node[02-03]         store-[1-2]",
        "  gpu-a        GPU-1  rollout/6",
        "  gpu-a               store-3",
        "  fd00--1             rollout/7",
        "  fd00--1             store-4",
    ]
    assert "secret" not in text + plan_json(plan)
    assert max(map(len, text.splitlines())) <= 80


def test_a_plan_shows_where_the_parts_of_a_replica_are(plan_of):
    spread = {"engine": "sglang", "tensor_parallel": 4, "hosts_per_replica": 2}
    plan = plan_of("a:3\nb:2\nc:4\n", replicas=2, rollout=spread)

    text = render(plan)
    assert [line for line in text.splitlines() if "part" in line and "one more" in line]
    assert text.partition("placement\n")[2].partition("\n\nloop")[0].splitlines() == [
        "  host  GPUs         actors",
        "  a                  queue,prompts,reward,store-0",
        "  a     [1-2]        rollout/0",
        "  a     0            trainer",
        "  b     [0-1]        rollout/1",
        "  b                  store-1",
        "  c     [0-1] [2-3]  part/[0-1]",
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_groups_of_gpus_are_told_apart():
    there = rooms(parse("a:8\nb:8"), {})
    placement = place(Needs(replicas=3, gpus_each=4, trainer_gpus=1), there)
    actors = ["rollout/0", "rollout/1", "rollout/2", "trainer"]
    need = Estimate(parameters=1, trainer_bytes=1, rollout_bytes=1, policy_bytes=1, queue_bytes=1)

    lines = render_hosts(plan_hosts(LaunchOptions(), there, placement, actors, need))

    assert lines[-5:] == [
        "  a     [1-4]        rollout/0",
        "  a     0            trainer",
        "  a                  store-0",
        "  b     [0-3] [4-7]  rollout/[1-2]",
        "  b                  store-1",
    ]


def test_a_host_alone_has_places_too(plan_of):
    assert "hosts (local, 1)" in render(plan_of("local:2", **{"--hosts": None}))


def test_hosts_of_an_allocation_are_not_known_yet(config):
    options = ask({}, {"SLURM_JOB_ID": "17"}, has_srun=True)

    assert "hosts (slurm: those of the allocation)\n" in render(make_plan(config, rows=4, options=options))
