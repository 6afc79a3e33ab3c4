"""Elastic children through the policy, with a manual clock: how replicas come and go while a tree runs."""

import msgspec
import pytest
from supervision_play import BUG, NORMAL, SIGKILL, STOPPED, child, play, running, tree

from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.events import KillChild, RemoveChild, Scale
from relax_actor.supervision.scaling import check_room
from relax_actor.supervision.spec import Elastic, Home, Intensity, SpecError
from relax_actor.supervision.spec_checks import validate
from relax_actor.supervision.states import ChildState

ELASTIC = Elastic(least=1, most=4, drain_s=30.0)


def elastic(replicas=2, **options):
    bounds = options.pop("elastic", ELASTIC)
    return child("r", replicas=replicas, always_indexed=True, elastic=bounds, **options)


def scale(world, replicas):
    return world.send(Scale(child="r", replicas=replicas)).new()


def refused(world, replicas):
    with pytest.raises(SpecError) as refusal:
        scale(world, replicas)
    return f"{refusal.value.fact} | {refusal.value.hint}"


def test_new_replicas_start_at_once_and_are_supervised() -> None:
    """An elastic child can have another number of replicas while the tree runs; new ones start at once."""
    world = running(child("a"), elastic(1))

    assert scale(world, 3) == ["spawn r/1#1", "spawn r/2#1"]
    world.make_ready()
    assert world.policy.replicas("r").count == 3
    world.die("r/2")
    assert world.wait(1.0) == ["spawn r/2#2"]
    world.make_ready()
    assert world.stop() == ["stop r/0#1", "stop r/1#1", "stop r/2#2"]
    assert world.reported(ReportKind.CHILD_SCALED) == [
        {"child": "r", "replicas": 3, "before": 1, "starting": ("r/1", "r/2"), "leaving": ()}
    ]


def test_the_highest_replicas_finish_what_they_have_and_leave() -> None:
    """Those with too high numbers finish what they have, leave, and are not restarted."""
    world = running(elastic(3), child("b"))

    assert scale(world, 1) == ["drain r/1#1", "drain r/2#1"]
    assert world.policy.replicas("r").leaving == ("r/1", "r/2")
    assert world.die("r/2", NORMAL) == []
    assert world.die("r/1", STOPPED) == []
    assert world.states() == {"r/0": ChildState.READY, "b": ChildState.READY}
    assert [each["child"] for each in world.reported(ReportKind.CHILD_REMOVED)] == ["r/2", "r/1"]


def test_a_drain_that_takes_too_long_is_a_stop_and_then_a_kill() -> None:
    """A replica that takes longer than `drain_s` to finish is stopped, and then killed."""
    world = running(elastic(2))
    scale(world, 1)

    assert world.wait(29.0) == []
    assert world.wait(1.0) == ["stop r/1#1"]
    assert world.wait(10.0) == ["kill r/1#1"]
    assert world.die("r/1") == []
    assert world.states() == {"r/0": ChildState.READY}


def test_a_stop_of_the_tree_overtakes_a_drain() -> None:
    """A stop of the tree overtakes a drain."""
    world = running(elastic(2))
    scale(world, 1)

    assert world.stop() == ["stop r/0#1", "stop r/1#1"]
    assert world.wait(10.0) == ["kill r/0#1", "kill r/1#1"]
    world.die("r/0")
    assert world.die("r/1") == ["finished ok"]


def test_without_time_to_stop_a_drain_ends_in_a_kill() -> None:
    world = running(elastic(2, shutdown_s=0.0))
    scale(world, 1)

    assert world.wait(30.0) == ["kill r/1#1"]


def test_a_replica_that_crashes_while_it_drains_is_gone_as_well() -> None:
    world = running(elastic(2), intensity=Intensity(restarts=0))
    scale(world, 1)

    assert world.die("r/1", BUG) == []
    assert world.wait(60.0) == []
    assert world.states() == {"r/0": ChildState.READY}


def test_replicas_that_wait_for_their_restart_or_still_start_are_let_go() -> None:
    world = running(elastic(3))
    world.die("r/2")
    world.die("r/1")
    world.wait(1.0)  # the second failure in a row waits longer for neither: both start
    assert scale(world, 1) == ["stop r/1#2", "stop r/2#2"]
    world.die("r/1", STOPPED)
    world.die("r/2", STOPPED)

    world = running(elastic(2))
    world.die("r/1")
    assert scale(world, 1) == []
    assert world.wait(60.0) == []
    assert world.states() == {"r/0": ChildState.READY}


def test_without_a_time_to_drain_replicas_are_stopped() -> None:
    world = running(elastic(2, elastic=Elastic(least=1)))

    assert scale(world, 1) == ["stop r/1#1"]


def test_one_change_at_a_time() -> None:
    """The number is absolute, and one change is made at a time: another is refused until it is done."""
    world = running(elastic(1))
    scale(world, 2)

    assert scale(world, 2) == []
    assert refused(world, 3) == ("is being scaled to 2: r/1 | one change at a time: wait until that is done")
    world.make_ready()
    scale(world, 1)
    assert "is being scaled to 1: r/1" in refused(world, 2)
    world.die("r/1", NORMAL)
    assert scale(world, 1) == []
    assert scale(world, 2) == ["spawn r/1#2"]  # no incarnation twice


def test_a_new_replica_that_does_not_start_is_forgotten() -> None:
    """A new replica that fails to start is reported and forgotten, and is nobody else's failure."""
    world = running(elastic(1), intensity=Intensity(restarts=0))
    scale(world, 3)
    world.ready("r/1")

    assert world.raise_in_init("r/2") == []
    assert world.states() == {"r/0": ChildState.READY, "r/1": ChildState.READY}
    assert world.reported(ReportKind.CHILD_REFUSED)[0]["child"] == "r/2"
    assert world.policy.replicas("r").count == 2
    assert scale(world, 3) == ["spawn r/2#2"]


def test_the_number_outlives_a_restart_of_the_supervisor() -> None:
    """The number of replicas outlives a restart of their supervisor."""
    world = running(tree(elastic(1), name="inner", intensity=Intensity(restarts=0)), child("z"))
    scale(world, 2)
    world.make_ready()

    world.die("r/0")
    world.die("r/1", STOPPED)
    assert world.wait(10.0) == ["spawn r/0#2", "spawn r/1#2"]


def test_a_hole_that_was_made_by_hand_is_filled() -> None:
    world = running(elastic(3))
    world.send(RemoveChild(name="r/1"))
    world.die("r/1", STOPPED)

    assert scale(world, 3) == ["spawn r/1#2"]


def test_bounds_are_kept() -> None:
    world = running(elastic(2))

    assert refused(world, 0) == "cannot have 0 replicas, fewer than 1 | "
    assert refused(world, 5) == "cannot have 5 replicas, more than 4 | "
    assert world.policy.replicas("r").count == 2


def test_what_is_not_elastic_has_a_fixed_number() -> None:
    world = running(child("r"), tree(child("b"), name="inner"))

    assert refused(world, 2).startswith("has a fixed number of replicas")
    for name, words in (("inner", "has a fixed number"), ("x", "is no child of any supervisor")):
        with pytest.raises(SpecError, match=words):
            world.send(Scale(child=name, replicas=2))
    with pytest.raises(SpecError, match="cannot be scaled"):
        world.policy.replicas("x")


def test_nothing_is_scaled_while_its_supervisor_starts_or_stops() -> None:
    world = play(elastic(1), child("b"))
    world.start()
    assert refused(world, 2) == "cannot be scaled now: `run` is starting | "
    world.make_ready()
    world.stop()
    assert refused(world, 2) == "cannot be scaled now: `run` is stopping | "


def test_an_actor_is_killed_and_follows_its_rules() -> None:
    world = running(child("a"), child("b"))

    assert world.send(KillChild(name="a", reason="killed by an operator")).new() == ["kill a#1"]
    assert world.reported(ReportKind.CHILD_KILLED)[0]["reason"] == "killed by an operator"
    for name, words in (("c", "is no actor of this tree"),):
        with pytest.raises(SpecError, match=words):
            world.send(KillChild(name=name, reason=""))
    assert world.send(KillChild(name="a", reason="again")).new() == []
    world.die("a", SIGKILL)
    with pytest.raises(SpecError, match="has no process now: it is backing_off"):
        world.send(KillChild(name="a", reason=""))
    assert world.wait(1.0) == ["spawn a#2"]


def test_a_replica_that_drains_can_be_killed() -> None:
    world = running(elastic(2))
    scale(world, 1)

    assert world.send(KillChild(name="r/1", reason="enough")).new() == ["kill r/1#1"]
    world.die("r/1", SIGKILL)
    assert world.states() == {"r/0": ChildState.READY}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (child("r", replicas=2, elastic=Elastic()), "numbered replicas"),
        (elastic(2, gang=True), "no ranks"),
        (elastic(2, elastic=Elastic(least=3)), "around replicas, which is 2"),
        (elastic(2, elastic=Elastic(most=1)), "around replicas, which is 2"),
        (elastic(2, elastic=Elastic(least=0)), "around replicas"),
        (elastic(2, elastic=Elastic(drain_s=-1.0)), "finite seconds"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(spec, words) -> None:
    with pytest.raises(SpecError, match=words):
        validate(tree(spec))


HOMES = tuple(Home(host=host, devices=(gpu,)) for host, gpu in ("a0", "b0", "a1", "c0"))


def room(replicas, taken=HOMES[:2], joined="ab", homes=HOMES):
    check_room(msgspec.structs.replace(elastic(2), homes=homes), replicas, taken, set(joined))


def test_there_has_to_be_a_place_for_every_new_replica() -> None:
    room(3)
    room(1)
    room(9, homes=())
    with pytest.raises(SpecError, match="has places for 4 replicas, not for 5"):
        room(5)
    with pytest.raises(SpecError, match="has its place on c, which is away"):
        room(4)
    with pytest.raises(SpecError, match="has its place on a, 1, where another replica is"):
        room(3, taken=HOMES[1:3])
