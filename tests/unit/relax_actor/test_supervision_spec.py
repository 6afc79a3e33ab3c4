"""What a supervision spec promises before anything starts."""

import random
from dataclasses import dataclass

import msgspec
import pytest

from relax_actor.supervision.spec import (
    Backoff,
    ChildSpec,
    Intensity,
    RestartType,
    SpecError,
    SupervisorSpec,
    actor_names,
    children_names,
    ids,
)
from relax_actor.supervision.spec_checks import validate


@dataclass
class Anything:
    """An actor class."""


def child(**options) -> ChildSpec:
    return ChildSpec(**{"id": "a", "actor": "roles:Any", **options})


def tree(*children, **options) -> SupervisorSpec:
    return SupervisorSpec(**{"id": "run", "children": children, **options})


def test_names_of_replicas_are_indexed() -> None:
    assert actor_names(child(id="rollout", replicas=2)) == ("rollout/0", "rollout/1")


def test_a_single_replica_has_the_bare_name_unless_always_indexed() -> None:
    assert actor_names(child(id="queue")) == ("queue",)
    assert actor_names(child(id="rollout", always_indexed=True)) == ("rollout/0",)


def test_names_of_a_tree_are_in_starting_order() -> None:
    spec = tree(child(id="z"), tree(child(id="b", replicas=2), id="inner"), child(id="a"))

    assert children_names(spec) == ("z", "b/0", "b/1", "a")
    assert ids(spec) == ("run", "z", "inner", "b", "a")


@pytest.mark.parametrize("actor", [Anything, "roles.rollout:Rollout", "folder/own actors.py:Rollout"])
def test_a_good_tree_is_valid(actor: type | str) -> None:
    rank = child(id="rank_0-b", significant=True, restart=RestartType.TRANSIENT, backoff=Backoff(base_s=0.0))

    validate(tree(child(actor=actor, shutdown_s=0.0), tree(rank, id="inner", auto_shutdown="any")))


@pytest.mark.parametrize(
    ("spec", "where", "fact"),
    [
        (tree(id=""), "root.id", "is ''"),
        (tree(id="Run"), "Run.id", "is 'Run'"),
        (tree(child(id="0a")), "run.children[0].id", "is '0a'"),
        (tree(child(), child(id="a/b")), "run.children[1].id", "only a-z, 0-9, `_` and `-`"),
        (tree(child(), tree(child(), id="inner")), "a", "names two children"),
        (tree(tree(id="run")), "run", "names two children"),
        (tree(child(actor="rollout")), "run.children[0].actor", "write `module:Class`"),
        (tree(child(replicas=0)), "run.children[0].replicas", "is 0; at least 1"),
        (tree(child(oom_score_adj=1001)), "run.children[0].oom_score_adj", "is 1001; between -1000 and 1000"),
        (tree(child(shutdown_s=-1.0)), "run.children[0].shutdown_s", "0 or more"),
        (tree(child(shutdown_s=float("inf"))), "run.children[0].shutdown_s", "finite"),
        (tree(child(start_timeout_s=0.0)), "run.children[0].start_timeout_s", "more than 0"),
        (tree(child(start_timeout_s=float("nan"))), "run.children[0].start_timeout_s", "is nan"),
        (tree(child(backoff=Backoff(jitter_frac=1.5))), "run.children[0].backoff.jitter_frac", "is 1.5"),
        (tree(child(spares=-1)), "run.children[0].spares", "is -1; at least 0"),
        (tree(child(spares=1, devices=("gpu:0",))), "run.children[0].spares", "needs a device of its own"),
        (tree(child(hang_after_s=0.0)), "run.children[0].hang_after_s", "more than 0"),
        (tree(child(abort_grace_s=0.0)), "run.children[0].abort_grace_s", "more than 0"),
        (
            tree(child(gang=True, restart=RestartType.TEMPORARY)),
            "run.children[0].gang",
            "contradicts restart `temporary`",
        ),
        (tree(backoff=Backoff(base_s=-1.0)), "run.backoff.base_s", "is -1.0"),
        (tree(backoff=Backoff(cap_s=-1.0)), "run.backoff.cap_s", "is -1.0"),
        (tree(backoff=Backoff(reset_after_s=-1.0)), "run.backoff.reset_after_s", "is -1.0"),
        (tree(intensity=Intensity(restarts=-1)), "run.intensity.restarts", "is -1; at least 0"),
        (tree(intensity=Intensity(within_s=0.0)), "run.intensity.within_s", "more than 0"),
        (tree(tree(child(replicas=-1), id="b")), "run.children[0].children[0].replicas", "is -1"),
        (tree(auto_shutdown="some"), "run.auto_shutdown", "is 'some'"),
        (tree(child(significant=True)), "run.children[0].significant", "contradicts restart `permanent`"),
        (
            tree(child(significant=True, restart=RestartType.TRANSIENT)),
            "run.children[0].significant",
            "has no effect",
        ),
    ],
)
def test_a_bad_field_is_named_by_its_path(spec: SupervisorSpec, where: str, fact: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(spec)

    assert caught.value.where == where
    assert fact in caught.value.fact


def test_no_failure_means_no_delay() -> None:
    assert Backoff().delay(0, random.Random(0)) == 0.0


def test_delays_stay_between_their_bounds_for_ever() -> None:
    backoff = Backoff(base_s=0.2, cap_s=60.0, jitter_frac=0.5)
    rng = random.Random(0)

    for failures in [*range(1, 100), 10**9]:
        longest_s = min(60.0, 0.2 * 2 ** min(failures - 1, 100))
        assert longest_s / 2 <= backoff.delay(failures, rng) <= longest_s


def test_replicas_do_not_restart_in_step() -> None:
    rng = random.Random(0)

    assert len({Backoff().delay(5, rng) for _ in range(8)}) == 8


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        child().replicas = 2
    assert msgspec.structs.replace(child(), replicas=2).replicas == 2
