"""Further promises of docs/concepts/supervision.md: hooks, exit kinds, spares, gangs, links, deadlines.

As in `test_supervision_policy.py`, a docstring is a sentence of that page, word for word.
"""

import pytest
from supervision_play import BUG, NORMAL, SIGKILL, STOPPED, child, play, running, tree

from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.events import (
    AwaitsHost,
    Decided,
    Decision,
    Dying,
    Exit,
    ExitKind,
    Failed,
    Gone,
    HostFound,
    InitFailed,
    KillRequested,
    LinkAdded,
    Released,
    RemoveChild,
    SpareReady,
)
from relax_actor.supervision.spec import Intensity, RestartType, SpecError, Strategy
from relax_actor.supervision.states import ChildState

OOM = Exit(kind=ExitKind.OOM, signal=9)
DEVICE = Exit(kind=ExitKind.DEVICE_LOST, code=1)
HOST = Exit(kind=ExitKind.LEASE, detail="node7")
MANY = Intensity(restarts=99)


def asked(*children, **options):
    return running(*children, consult_s=10.0, **options)


# -- what failed, and how ---------------------------------------------------------------------------


def test_out_of_memory_is_tried_twice_again() -> None:
    """What ran out of memory is started again twice in a row, and not a third time."""
    world = running(child("a", replicas=2), intensity=MANY)

    for name in ("a/0", "a/1"):
        world.die(name, OOM)
        world.wait(9.0)
        world.make_ready()
    world.die("a/0", OOM)
    world.die("a/1", STOPPED)

    assert world.finished is not None
    assert "`a/0` ran out of memory 3 times in a row, so `run` stopped" in world.finished.reason


def test_other_failures_and_long_lives_end_a_row() -> None:
    world = running(child("a"), intensity=MANY)

    for exit_, lives_s in ((OOM, 1), (OOM, 1), (SIGKILL, 1), (OOM, 1), (OOM, 200), (OOM, 1)):
        world.die("a", exit_)
        world.wait(9.0)
        world.make_ready()
        world.wait(lives_s)
    assert world.states() == {"a": ChildState.READY}


def test_a_device_lost_twice_is_given_up() -> None:
    """An actor that loses its device twice in a row fails its supervisor."""
    world = running(child("a", replicas=2), intensity=MANY)

    for name in ("a/0", "a/1"):
        world.die(name, DEVICE)
        world.wait(1.0)
        world.make_ready()
    world.die("a/0", DEVICE)
    world.die("a/1", STOPPED)

    assert world.finished is not None
    assert "`a/0` lost its device 2 times in a row" in world.finished.reason


def test_a_hang_is_killed_and_restarted() -> None:
    """Who hangs is killed, after its stacks are written down, and has failed like any other."""
    world = running(child("a"))

    assert world.hang("a") == ["kill a#1"]
    assert world.hang("a") == []
    assert world.reported(ReportKind.CHILD_KILLED)[0]["reason"] == "hung: busy"
    assert world.die("a") == []
    assert world.reported(ReportKind.CHILD_RESTARTING)[0]["reason"] == "hung: busy"
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.hang("a") == ["kill a#2"]  # also while it starts


def test_a_lost_host_is_one_restart() -> None:
    """A lost host is one restart, however many of the children were on it."""
    world = running(child("a", replicas=8), intensity=Intensity(restarts=1))

    for replica in range(8):
        world.die(f"a/{replica}", HOST)
        world.wait(0.01)
    world.wait(1.0)
    assert set(world.make_ready().states().values()) == {ChildState.READY}

    world.wait(5.0)
    world.die("a/0", HOST)
    assert "escalated" in {report.kind for report in world.reports}


def test_no_time_to_start_runs_out_while_there_is_no_host() -> None:
    """A child whose host is away waits for it, unless there is room elsewhere; no time to start runs out."""
    world = running(child("a", start_timeout_s=30.0))
    world.die("a", Exit(kind=ExitKind.LEASE))
    world.wait(1.0)

    world.send(AwaitsHost(name="a", incarnation=2, host="node2"))
    assert world.wait(10_000.0) == []
    assert world.reported(ReportKind.CHILD_AWAITS_HOST) == [{"child": "a", "incarnation": 2, "host": "node2"}]

    world.send(HostFound(name="a", incarnation=2))
    assert world.wait(29.9) == []
    assert world.wait(0.1) == ["kill a#2"]


def test_news_of_a_host_changes_nothing_for_a_child_that_is_not_starting() -> None:
    world = running(child("a", start_timeout_s=30.0))

    world.send(AwaitsHost(name="a", incarnation=1, host="node2"))
    world.send(HostFound(name="a", incarnation=1))
    assert world.wait(100.0) == []
    assert world.reported(ReportKind.CHILD_AWAITS_HOST) == []


# -- the hook ---------------------------------------------------------------------------------------


def test_the_hook_is_asked_once_for_each_failure() -> None:
    """An `on_failure` hook is asked once about each incarnation that failed, before anything follows."""
    world = asked(child("a"), child("b"), strategy=Strategy.ONE_FOR_ALL)

    assert world.die("a") == ["ask a#1"]
    question = world.questions[0]
    assert (question.exit, question.restarts, question.supervisor) == (SIGKILL, 0, "run")
    assert world.states()["a"] is ChildState.AWAITING
    assert world.decide("a", None) == ["stop b#1"]
    assert world.decide("a", None) == []  # it was answered
    assert world.die("b", STOPPED) == []
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.die("a", NORMAL) == ["ask a#2"]  # to end before it is ready is a failure


def test_the_hook_is_not_asked_about_who_ended_well() -> None:
    """It is not asked about who ended well, nor about who was to stop."""
    world = asked(child("a"), child("b", restart=RestartType.TRANSIENT))

    assert world.die("b", NORMAL) == []
    assert world.die("a", NORMAL) == []
    assert world.wait(1.0) == ["spawn a#2"]
    world.ready("a")
    world.stop()
    assert world.die("a") == ["finished ok"]


def test_the_hook_can_restart() -> None:
    """It can restart what its restart type would not, after the back-off and within the intensity."""
    world = asked(child("a", restart=RestartType.TEMPORARY), child("b"), intensity=Intensity(restarts=1))

    world.die("a")
    assert world.decide("a", Decision.RESTART) == []
    assert world.reported(ReportKind.FAILURE_DECIDED)[0]["decision"] == "restart"
    assert world.wait(1.0) == ["spawn a#2"]
    world.ready("a")
    world.die("a")
    assert world.decide("a", Decision.RESTART) == ["stop b#1"]


def test_the_hook_can_insist_where_the_rules_give_up() -> None:
    """It can insist on a restart where the rules would give up, such as after a third out of memory."""
    world = asked(child("a"), intensity=MANY)

    for _ in range(5):
        world.die("a", OOM)
        world.decide("a", Decision.RESTART)
        world.wait(9.0)
        world.make_ready()
    assert world.finished is None


def test_the_hook_can_leave_a_child_down() -> None:
    """It can leave a child down, which is then no failure of its supervisor, not even if significant."""
    significant = child("a", restart=RestartType.TRANSIENT, significant=True)
    world = asked(significant, child("b"), auto_shutdown="any")

    world.die("a")
    assert world.decide("a", Decision.IGNORE) == []
    assert world.states() == {"a": ChildState.ENDED, "b": ChildState.READY}


def test_the_hook_can_escalate() -> None:
    """It can fail the supervisor; what the hook raised does, too, and is part of the report."""
    world = asked(child("a"))

    world.die("a")
    assert world.decide("a", Decision.ESCALATE, "it raised ValueError: x") == ["finished failed"]
    assert world.finished is not None
    assert "`a` failed and on_failure escalates (it raised ValueError: x)" in world.finished.reason

    world = asked(child("a"))
    world.die("a")
    world.decide("a", Decision.ESCALATE)
    assert world.finished is not None
    assert "on_failure escalates, so `run` stopped" in world.finished.reason


def test_the_rules_decide_where_the_hook_does_not() -> None:
    """Without an answer, or without one in time, the rules decide."""
    world = asked(child("a"))

    world.die("a")
    assert world.wait(10.0) == []
    assert world.reported(ReportKind.HOOK_LATE) == [{"child": "a", "incarnation": 1, "after_s": 10.0}]
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.decide("a", Decision.ESCALATE) == []  # too late: it is about another incarnation


def test_a_stop_does_not_wait_for_the_hook() -> None:
    """A stop does not wait for the hook, and neither does a removal."""
    world = asked(child("a"), child("b"))

    world.die("a")
    assert world.stop() == ["stop b#1"]
    assert world.die("b", STOPPED) == ["finished ok"]

    world = asked(child("a"), child("b"))
    world.die("a")
    world.send(RemoveChild(name="a"))
    assert world.states() == {"b": ChildState.READY}
    assert world.decide("a", Decision.RESTART) == []


def test_the_hook_can_save_a_first_start() -> None:
    """A first start that fails is the hook's to decide, too."""
    world = play(child("a"), child("b"), consult_s=1.0)

    world.start()
    assert world.die("a", BUG) == ["ask a#1"]
    assert world.decide("a", Decision.RESTART) == []
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.ready("a") == ["spawn b#1"]


# -- spares -----------------------------------------------------------------------------------------


def test_spares_are_started_once_the_child_is_ready() -> None:
    """A child's spares are started once all is ready, and filled up after each loss."""
    world = play(child("a", spares=2), child("b"))

    world.start()
    world.ready("a")
    assert world.ready("b") == ["spare a/SPARE/1", "spare a/SPARE/2"]
    assert world.spare_ready("a/SPARE/1") == []
    assert world.reported(ReportKind.SPARE_READY) == [{"spare": "a/SPARE/1"}]
    assert world.policy.snapshot().spares == ("a/SPARE/1", "a/SPARE/2")


def test_a_spare_takes_over_at_once() -> None:
    """A ready spare takes over at once as the next incarnation; 0.2 s later the next one is started."""
    world = running(child("a", replicas=2, spares=1))
    world.spare_ready("a/SPARE/1")

    assert world.die("a/1") == []
    assert world.wait(0.0) == ["promote a/SPARE/1 a/1#2"]
    assert world.reported(ReportKind.RESTART_BY_SPARE) == [
        {"child": "a/1", "incarnation": 2, "spare": "a/SPARE/1"}
    ]
    assert world.ready("a/1") == []
    assert world.wait(0.2) == ["spare a/SPARE/2"]


def test_without_a_ready_spare_a_restart_is_like_any_other() -> None:
    """Without a ready spare a restart is like any other."""
    world = running(child("a", spares=1))

    assert world.die("a") == []
    assert world.wait(0.5) == []
    assert world.wait(0.5) == ["spawn a#2"]


def test_a_lost_spare_is_replaced() -> None:
    """A spare that is lost is replaced after a back-off, and is nobody's failure."""
    world = running(child("a", spares=2), intensity=Intensity(restarts=0))

    assert world.die("a/SPARE/1") == []
    assert world.reported(ReportKind.SPARE_LOST) == [{"spare": "a/SPARE/1", "reason": "SIGKILL"}]
    assert world.die("a/SPARE/2") == []
    assert world.wait(1.0) == ["spare a/SPARE/3", "spare a/SPARE/4"]
    assert world.send(InitFailed(name="a/SPARE/3", incarnation=1, error="x")).new() == ["kill a/SPARE/3#1"]
    assert world.send(SpareReady(name="a/SPARE/3")).new() == []  # too late
    assert world.die("a/SPARE/3") == []
    assert world.states() == {"a": ChildState.READY}


def test_a_spare_over_its_time_is_killed() -> None:
    """A spare that is not ready within `start_timeout_s` is killed."""
    world = running(child("a", spares=1, start_timeout_s=5.0))

    assert world.wait(5.0) == ["kill a/SPARE/1#1"]
    assert world.stop() == ["stop a#1"]  # it was killed already


def test_spares_are_killed_with_their_supervisor() -> None:
    """Spares are killed when their supervisor comes down, or their child is removed."""
    world = running(child("a", spares=2), child("b"))
    world.spare_ready("a/SPARE/1")

    assert world.stop() == ["kill a/SPARE/1#1", "kill a/SPARE/2#1", "stop b#1"]
    assert world.die("b", STOPPED) == ["stop a#1"]
    assert world.die("a", STOPPED) == []
    assert world.die("a/SPARE/1") == []
    assert world.die("a/SPARE/2") == ["finished ok"]

    world = running(child("a", spares=1), child("b"))
    world.send(RemoveChild(name="a"))
    world.new()
    assert world.die("a", STOPPED) == ["kill a/SPARE/1#1"]
    world.die("a/SPARE/1")
    assert world.policy.snapshot().spares == ()


def test_what_is_heard_of_no_spare_changes_nothing() -> None:
    world = running(child("a", spares=1))

    world.send(SpareReady(name="a/SPARE/9"))
    world.send(Gone(name="a/SPARE/9", incarnation=1, exit=SIGKILL))
    assert [each["event"] for each in world.reported(ReportKind.STALE_EVENT)] == ["SpareReady", "Gone"]
    assert world.die("a/SPARE/1") == []
    assert world.stop() == ["stop a#1"]  # a refill that waits is called off


# -- gangs ------------------------------------------------------------------------------------------


def test_a_gang_meets_when_all_ranks_are_ready() -> None:
    """The ranks of a gang join a group once all are ready, under an epoch that never repeats."""
    world = play(child("a", replicas=2, gang=True))

    world.start()
    assert world.ready("a/0") == []
    assert world.ready("a/1") == ["regroup a/0#1 1", "regroup a/1#1 1"]
    assert [(group.gang, group.rank, group.size) for group in world.groups] == [("a", 0, 2), ("a", 1, 2)]
    assert world.reported(ReportKind.GANG_FORMED) == [{"gang": "a", "epoch": 1, "ranks": ["a/0", "a/1"]}]


def test_the_first_death_breaks_a_gang() -> None:
    """The first death has the other ranks abort; who answers keeps its process and joins the next group."""
    world = running(child("a", replicas=3, gang=True))

    assert world.die("a/1") == ["abort a/0#1 1", "abort a/2#1 1"]
    assert world.release("a/0", "a/2") == []
    assert world.wait(1.0) == ["spawn a/1#2"]
    assert world.ready("a/1") == ["regroup a/0#1 2", "regroup a/1#2 2", "regroup a/2#1 2"]
    assert world.reported(ReportKind.GANG_ABORTED) == [
        {"gang": "a", "epoch": 1, "child": "a/1", "survivors": ["a/0", "a/2"], "reason": "SIGKILL"}
    ]


def test_a_rank_that_stays_in_its_collective_is_killed() -> None:
    """Who does not leave its collective within `abort_grace_s` is killed, as part of the same failure."""
    world = running(child("a", replicas=3, gang=True, abort_grace_s=5.0), intensity=Intensity(restarts=1))

    world.die("a/1")
    world.release("a/0")
    world.wait(1.0)
    world.ready("a/1")
    assert world.wait(4.0) == ["kill a/2#1"]
    assert world.die("a/2") == ["spawn a/2#2"]
    assert world.ready("a/2") == ["regroup a/0#1 2", "regroup a/1#2 2", "regroup a/2#2 2"]


def test_a_survivor_that_dies_meanwhile_is_part_of_the_same_failure() -> None:
    """A survivor that dies before the next group is part of the same failure; what was restarted is not."""
    world = running(child("a", replicas=2, gang=True), intensity=Intensity(restarts=1))

    world.die("a/0")
    assert world.die("a/1", BUG) == ["spawn a/1#2"]
    assert world.die("a/1", BUG) == ["finished failed"]


def test_a_dying_rank_breaks_its_gang_before_it_is_gone() -> None:
    """A permanent rank that is dying breaks its gang before it is gone; another may be ending well."""
    world = running(child("a", replicas=2, gang=True))
    dying = Dying(name="a/0", incarnation=1)

    assert world.send(dying).new() == ["abort a/1#1 1"]
    assert world.send(dying).new() == []
    assert world.release("a/1") == []  # and does not meet the dying again
    assert world.send(Dying(name="a/1", incarnation=1)).new() == []
    assert world.die("a/0") == []

    world = running(child("a", replicas=2, gang=True, restart=RestartType.TRANSIENT))
    assert world.send(dying).new() == []
    assert world.die("a/0", NORMAL) == []

    world = running(child("a", replicas=2, gang=True))
    world.stop()
    assert world.send(dying).new() == []


def test_a_rank_that_ended_well_comes_back_with_its_gang() -> None:
    """A rank that ended well is started again when its gang is broken."""
    world = running(child("a", replicas=2, gang=True, restart=RestartType.TRANSIENT))

    world.die("a/0", NORMAL)
    assert world.die("a/1") == ["spawn a/0#2"]
    world.ready("a/0")
    assert world.wait(1.0) == ["spawn a/1#2"]
    assert world.ready("a/1") == ["regroup a/0#2 2", "regroup a/1#2 2"]


def test_a_shared_restart_gets_ranks_out_of_their_collectives_first() -> None:
    """Where a gang's supervisor restarts all, the ranks leave their collectives before they are stopped."""
    world = running(child("a", replicas=2, gang=True), strategy=Strategy.ONE_FOR_ALL)

    assert world.die("a/0") == ["abort a/1#1 1", "stop a/1#1"]
    assert world.release("a/1") == []
    assert world.die("a/1", STOPPED) == []
    assert world.wait(1.0) == ["spawn a/0#2", "spawn a/1#2"]
    assert world.ready("a/0", "a/1") == ["regroup a/0#2 2", "regroup a/1#2 2"]


def test_a_gang_that_is_restarted_for_another_meets_again() -> None:
    world = running(child("a"), child("b", replicas=2, gang=True), strategy=Strategy.ONE_FOR_ALL)

    assert world.die("a") == ["stop b/0#1", "stop b/1#1"]
    world.die("b/0", STOPPED)
    world.die("b/1", STOPPED)
    world.wait(1.0)
    world.ready("a")
    assert world.ready("b/0", "b/1") == ["regroup b/0#2 2", "regroup b/1#2 2"]


def test_a_rank_is_not_removed_without_its_gang() -> None:
    """A rank cannot be removed without its gang."""
    world = running(child("a", replicas=2, gang=True), child("b"))

    with pytest.raises(SpecError, match="is a rank of a gang; remove `a` as a whole"):
        world.send(RemoveChild(name="a/0"))
    assert world.send(RemoveChild(name="a")).new() == ["stop a/0#1", "stop a/1#1"]


def test_a_release_of_another_epoch_means_nothing() -> None:
    world = running(child("a", replicas=2, gang=True, abort_grace_s=5.0))

    world.die("a/0")
    world.send(Released(name="a/1", incarnation=1, epoch=7))
    assert "kill a/1#1" in world.wait(5.0)


# -- links ------------------------------------------------------------------------------------------


def test_linked_actors_share_their_fate() -> None:
    """When an actor fails, those linked to it, directly or through others, are killed with it."""
    world = running(*(child(name) for name in "abcd"), intensity=MANY)
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        world.send(LinkAdded(a=one, b=other))

    assert world.die("c") == ["kill a#1", "kill b#1"]
    assert world.die("a") == []
    assert world.reported(ReportKind.CHILD_RESTARTING)[-1]["reason"] == (
        "error: linked to `c`, which failed: SIGKILL"
    )
    assert [each["child"] for each in world.reported(ReportKind.LINKED_KILL)] == ["a", "b"]


def test_a_death_by_link_does_not_come_back() -> None:
    """A death by link does not come back to whom it came from, even if that one runs again."""
    world = running(child("a"), child("b"))
    world.send(LinkAdded(a="a", b="b"))

    world.die("a")
    assert world.wait(1.0) == ["spawn a#2"]
    world.ready("a")
    assert world.die("b") == []
    assert world.wait(1.0) == ["spawn b#2"]


def test_a_link_is_about_failures_only() -> None:
    """Nobody is killed by a link because the other one ended well, was stopped, or is already down."""
    world = running(child("a"), child("b", restart=RestartType.TRANSIENT), child("c"))
    world.send(LinkAdded(a="a", b="b"))
    world.send(LinkAdded(a="a", b="c"))

    assert world.die("b", NORMAL) == []
    world.send(RemoveChild(name="c"))
    world.new()
    assert world.die("c") == []
    assert world.die("a") == []
    with pytest.raises(SpecError, match="is no actor of this tree"):
        world.send(LinkAdded(a="a", b="c"))


# -- the whole stop ---------------------------------------------------------------------------------


def test_a_stop_over_its_total_time_kills_what_is_left() -> None:
    """A tree that is not down within `stop_total_s` has what is left killed, and the end names whom."""
    world = running(child("a"), child("b", shutdown_s=1.0), child("c"), stop_total_s=5.0)

    world.stop()
    world.die("c", STOPPED)
    assert world.wait(1.0) == ["kill b#1"]
    assert world.wait(4.0) == ["kill a#1"]
    assert world.reported(ReportKind.STOP_OVERDUE) == [
        {"supervisor": "run", "after_s": 5.0, "children": ["a", "b"]}
    ]
    world.die("b")
    assert world.die("a") == ["finished ok"]
    assert world.finished is not None
    assert world.finished.killed == ("b#1", "a#1")


def test_the_total_time_also_bounds_a_failed_run() -> None:
    """A run that fails comes down within that time, too."""
    world = running(child("a"), child("b"), intensity=Intensity(restarts=0), stop_total_s=5.0)

    assert world.die("b") == ["stop a#1"]
    assert world.wait(5.0) == ["kill a#1"]
    assert world.die("a") == ["finished failed"]

    world = running(child("a"), intensity=Intensity(restarts=0), stop_total_s=5.0)
    world.stop()
    assert world.die("a", STOPPED) == ["finished ok"]


def test_a_kill_leaves_nothing_for_the_deadline() -> None:
    world = running(child("a"), stop_total_s=5.0)

    world.send(KillRequested(reason="now"))
    assert world.wait(6.0) == ["kill a#1"]
    assert world.die("a") == ["finished ok"]


def test_an_answer_about_a_stranger_changes_nothing() -> None:
    world = asked(child("a"))

    world.send(Decided(name="b", incarnation=1, decision=Decision.IGNORE))
    world.send(Decided(name="a", incarnation=1, decision=Decision.IGNORE))
    world.send(Failed(name="b", incarnation=1, exit=SIGKILL))
    assert world.states() == {"a": ChildState.READY}
    assert tree(name="run").id == "run"
