"""Updates as plans, routes and versions of tokens: all that is pure."""

import itertools

import pytest

from relax_actor.engines.sglang.weights.borders import as_sampled
from relax_actor.engines.sglang.weights.plan import Step, UpdateMode, body, plan
from relax_actor.engines.sglang.weights.records import Deadlines
from relax_actor.engines.sglang.weights.routes import (
    Backend,
    UpdateRoute,
    WeightPlacement,
    candidates,
    group_backend,
)
from relax_actor.ids import PolicyVersion

ALL = tuple(UpdateRoute)
OLD = {"sessions": False, "retract": False}  # up to 0.5.20
NEW = {"sessions": True, "retract": True}


@pytest.mark.parametrize(
    ("mode", "facts", "steps"),
    [
        (UpdateMode.IN_PLACE, OLD, "pause load version continue"),
        (UpdateMode.IN_PLACE, NEW, "pause begin load end version continue"),
        (UpdateMode.ABORT, OLD, "pause load flush version continue"),
        (UpdateMode.ABORT, NEW, "pause begin load end flush version continue"),
        (UpdateMode.RETRACT, NEW, "pause begin load end flush version continue"),
    ],
)
def test_an_update_takes_the_steps_that_its_server_asks_for(mode, facts, steps):
    assert " ".join(plan(mode, UpdateRoute.IPC, verify=False, on_gpu=False, **facts)) == steps


def test_a_pause_in_place_waits_for_the_step_on_the_gpu():
    steps = plan(UpdateMode.IN_PLACE, UpdateRoute.IPC, verify=True, on_gpu=True, **NEW)

    assert " ".join(steps) == "pause drain begin load end version checksum continue"
    assert body(Step.DRAIN, UpdateMode.IN_PLACE) == {"action": "checksum", "skip_tensor_list": [""]}


def test_files_are_read_without_a_session():
    steps = plan(UpdateMode.ABORT, UpdateRoute.DISK, verify=False, on_gpu=False, **NEW)

    assert " ".join(steps) == "pause load flush version continue"


def test_every_plan_loads_between_a_pause_and_the_checks():
    """Nothing is decoded with weights that are half new, whatever is asked for."""
    flags = itertools.product(UpdateMode, UpdateRoute, (False, True), (False, True), (False, True))
    for mode, route, sessions, verify, on_gpu in flags:
        steps = plan(mode, route, sessions=sessions, retract=True, verify=verify, on_gpu=on_gpu)
        assert steps[0] is Step.PAUSE
        assert steps[-1] is Step.CONTINUE
        assert steps.index(Step.LOAD) < steps.index(Step.VERSION)
        assert (Step.BEGIN in steps) == (Step.END in steps) == (sessions and route is not UpdateRoute.DISK)
        assert (Step.FLUSH in steps) == (mode is not UpdateMode.IN_PLACE)


def test_retraction_is_refused_where_the_stale_cache_would_stay():
    with pytest.raises(ValueError, match="refuses to flush"):
        plan(UpdateMode.RETRACT, UpdateRoute.IPC, verify=False, on_gpu=True, **OLD)


def test_steps_of_one_call_say_what_they_have_to():
    assert body(Step.PAUSE, UpdateMode.RETRACT) == {"mode": "retract"}
    assert body(Step.CONTINUE, UpdateMode.ABORT) == {"torch_empty_cache": False}
    assert body(Step.BEGIN, UpdateMode.ABORT) == {}


def test_the_best_open_route_comes_first():
    here = WeightPlacement(device="cuda:1", server_devices=("cuda:0", "cuda:1"), ranks=2)

    assert candidates(here, ALL, has_files=True) == ALL
    assert candidates(here, ALL, has_files=False) == (UpdateRoute.IPC, UpdateRoute.GROUP)
    assert candidates(here, (UpdateRoute.DISK,), has_files=True) == (UpdateRoute.DISK,)


def test_handles_reach_neither_other_gpus_nor_other_hosts():
    elsewhere = WeightPlacement(device="cuda:2", server_devices=("cuda:0",))
    wide = WeightPlacement(device="cuda:0", server_devices=("cuda:0",), ranks=2, hosts=2)

    assert candidates(elsewhere, ALL, has_files=True) == (UpdateRoute.GROUP, UpdateRoute.DISK)
    assert candidates(wide, ALL, has_files=True) == (UpdateRoute.GROUP,)


def test_nccl_carries_a_group_only_from_a_gpu_of_its_own():
    assert group_backend(WeightPlacement()) is Backend.GLOO
    assert group_backend(WeightPlacement(device="cuda:0", server_devices=("cuda:0",))) is Backend.GLOO
    assert group_backend(WeightPlacement(device="cuda:2", server_devices=("cuda:0",))) is Backend.NCCL


def test_a_step_has_longer_for_more_bytes():
    deadlines = Deadlines(step_s=10.0, bytes_per_s=1e6)

    assert deadlines.of() == 10.0
    assert deadlines.of(5_000_000) == 15.0


def _versions(*numbers: int) -> list[PolicyVersion]:
    return [PolicyVersion(number) for number in numbers]


def test_the_first_token_after_an_update_is_the_old_weights():
    assert as_sampled(_versions(1, 1, 2, 2), PolicyVersion(1)) == [1, 1, 1, 2]
    assert as_sampled(_versions(2, 2), PolicyVersion(1)) == [1, 2]  # its first step was under way
    assert as_sampled(_versions(1, 1), PolicyVersion(1)) == [1, 1]
    assert as_sampled([], PolicyVersion(1)) == []
