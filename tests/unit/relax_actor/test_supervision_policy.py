"""Each promise of docs/concepts/supervision.md, played through the policy with a manual clock.

A docstring here is a sentence of that page, word for word; `test_supervision_states.py` compares the two.
"""

import pytest
from supervision_play import (
    BUG,
    NORMAL,
    SIGKILL,
    STEADY,
    STOPPED,
    abc,
    child,
    play,
    running,
    tree,
)

from relax_actor.supervision.commands import Finished, ReportKind
from relax_actor.supervision.events import (
    AddChild,
    Exit,
    ExitKind,
    Gone,
    InitFailed,
    KillRequested,
    Ready,
    RemoveChild,
    StartAll,
    StopRequested,
    TimerFired,
)
from relax_actor.supervision.spec import (
    Backoff,
    ChildSpec,
    Intensity,
    RestartType,
    SpecError,
    Strategy,
)
from relax_actor.supervision.states import ChildState

# -- start and stop ---------------------------------------------------------------------------------


def test_children_start_in_declaration_order() -> None:
    """Children start in the order they are declared, each once the one before is ready."""
    world = play(*abc())

    assert world.start() == ["spawn a#1"]
    assert world.ready("a") == ["spawn b#1"]
    assert world.ready("b") == ["spawn c#1"]
    assert world.ready("c") == []


def test_replicas_start_together() -> None:
    """The replicas of one child start and stop together."""
    world = play(child("a", replicas=2), child("b"))

    assert world.start() == ["spawn a/0#1", "spawn a/1#1"]
    assert world.ready("a/1") == []
    assert world.ready("a/0") == ["spawn b#1"]

    world.stop()
    assert world.die("b", STOPPED) == ["stop a/0#1", "stop a/1#1"]


def test_a_supervisor_is_ready_when_its_children_are() -> None:
    """A supervisor below another is a child like any: it is ready once all of its children are."""
    world = play(tree(*abc()[:2], name="inner"), child("z"))

    assert world.start() == ["spawn a#1"]
    assert world.ready("a") == ["spawn b#1"]
    assert world.ready("b") == ["spawn z#1"]
    world.ready("z")
    assert [report["supervisor"] for report in world.reported(ReportKind.SUPERVISOR_READY)] == [
        "inner",
        "run",
    ]


def test_an_empty_supervisor_is_ready_at_once() -> None:
    world = play(tree(name="elastic"), child("z"))

    assert world.start() == ["spawn z#1"]


def test_a_failed_first_start_stops_what_was_started() -> None:
    """A child that fails in the first start fails its supervisor, which stops what it started, last first."""
    world = play(*abc())
    world.start()
    world.ready("a")
    world.ready("b")

    assert world.raise_in_init("c") == ["stop b#1"]
    assert world.die("b", STOPPED) == ["stop a#1"]
    assert world.die("a", STOPPED) == ["finished failed"]
    assert world.finished.reason == (
        "`c` did not start, so `run` stopped\n"
        "  first exit: exit code 1: ValueError: bad row, `c` incarnation 1"
    )


def test_a_failed_first_start_fails_upward() -> None:
    """A first start that fails below fails every supervisor above that is starting too."""
    world = play(child("a"), tree(child("b"), name="inner"))
    world.start()
    world.ready("a")

    assert world.die("b") == ["stop a#1"]
    assert world.die("a", STOPPED) == ["finished failed"]
    assert world.finished.reason.startswith(
        "`inner` did not start, so `run` stopped\n  first exit: SIGKILL, `b`"
    )


def test_a_child_that_was_ready_is_restarted_even_while_others_start() -> None:
    """A child that dies after it was ready is restarted, even if others have not started yet."""
    world = play(*abc()[:2])
    world.start()
    world.ready("a")

    assert world.die("a") == []
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.ready("b") == []
    world.ready("a")
    assert world.reported(ReportKind.SUPERVISOR_READY) == [{"supervisor": "run"}]


def test_an_end_before_ready_is_a_failure() -> None:
    """To end before it is ready is a failure, whatever the exit code."""
    world = play(child("a", restart=RestartType.TRANSIENT))
    world.start()

    assert world.die("a", NORMAL) == ["finished failed"]
    assert "exit code 0: ended before it was ready" in world.finished.reason


def test_stop_goes_in_reverse() -> None:
    """A stop goes through the children in reverse, each told once the one after it is gone."""
    world = running(*abc())

    assert world.stop() == ["stop c#1"]
    assert world.die("c", STOPPED) == ["stop b#1"]
    assert world.die("b", STOPPED) == ["stop a#1"]
    assert world.die("a", STOPPED) == ["finished ok"]
    assert world.finished == Finished(outcome="ok", reason="SIGINT")


def test_a_stop_goes_through_supervisors_in_reverse() -> None:
    world = running(child("a"), tree(child("b"), child("c"), name="inner"))

    assert world.stop() == ["stop c#1"]
    assert world.die("c", STOPPED) == ["stop b#1"]
    assert world.die("b", STOPPED) == ["stop a#1"]
    assert world.die("a", STOPPED) == ["finished ok"]


def test_a_child_over_its_shutdown_time_is_killed() -> None:
    """A child that is not gone `shutdown_s` after it was told to stop is killed."""
    world = running(child("a", shutdown_s=5.0))
    world.stop()

    assert world.wait(4.9) == []
    assert world.wait(0.1) == ["kill a#1"]
    assert world.wait(1e6) == []
    assert world.die("a") == ["finished ok"]


def test_a_child_without_shutdown_time_is_killed_at_once() -> None:
    """With a `shutdown_s` of 0 it is killed at once."""
    world = running(child("a", shutdown_s=0.0))

    assert world.stop() == ["kill a#1"]
    assert world.timers == {}


def test_a_death_while_stopping_is_no_failure() -> None:
    """Who dies while the tree stops has not failed: the run still ends well."""
    world = running(*abc()[:2])
    world.stop()

    assert world.die("a", BUG) == []  # not its turn yet
    assert world.die("b", SIGKILL) == ["finished ok"]


def test_nothing_is_restarted_below_a_supervisor_that_will_be_stopped() -> None:
    inner = tree(child("a"), child("b"), name="inner")
    world = running(tree(inner, name="outer"), child("z"))

    world.stop()
    assert world.die("a") == []  # `z` is being stopped; `outer` and `inner` have not been told yet
    assert world.wait(5.0) == []
    assert world.die("z", STOPPED) == ["stop b#1"]


def test_a_kill_takes_everybody_at_once() -> None:
    """A kill asks nobody: every actor is killed at once, and the tree finishes when all are gone."""
    world = running(*abc())
    world.stop()  # the first Ctrl-C

    assert world.send(KillRequested(reason="SIGINT twice")).new() == ["kill c#1", "kill b#1", "kill a#1"]
    assert world.send(KillRequested(reason="SIGINT thrice")).new() == []
    for name in "abc":
        world.die(name)
    assert world.finished == Finished(outcome="ok", reason="SIGINT")


def test_a_kill_needs_no_stop_before_it() -> None:
    world = running(*abc()[:1], tree(*abc()[1:], name="inner"))
    world.die("c")  # backing off

    assert world.send(KillRequested(reason="lost")).new() == ["kill b#1", "kill a#1"]
    world.die("a")
    world.die("b")
    assert world.finished == Finished(outcome="ok", reason="lost")


def test_a_stop_before_the_start_finishes() -> None:
    world = play(*abc())

    assert world.stop("never mind") == ["finished ok"]
    assert world.start() == []
    assert world.policy.is_finished


def test_a_second_start_changes_nothing() -> None:
    world = running(*abc())

    assert world.start() == []


def test_a_second_stop_changes_nothing() -> None:
    world = running(*abc())
    world.stop("first")

    assert world.stop("second") == []
    for name in "cba":
        world.die(name, STOPPED)
    assert world.finished.reason == "first"


def test_nothing_is_decided_after_the_end() -> None:
    """After it has finished a tree does nothing more, whatever it is told."""
    world = running(child("a"))
    world.stop()
    world.die("a", STOPPED)

    for event in (StartAll(), Ready(name="a", incarnation=1), StopRequested(reason="again")):
        assert world.policy.handle(event, 9.0) == []


# -- who is restarted -------------------------------------------------------------------------------


@pytest.mark.parametrize("exit_", [NORMAL, STOPPED, SIGKILL, BUG])
def test_a_permanent_child_is_always_restarted(exit_: Exit) -> None:
    """A permanent child is restarted however it ended."""
    world = running(child("a"))

    world.die("a", exit_)
    assert world.wait(1.0) == ["spawn a#2"]


@pytest.mark.parametrize("kind", ExitKind)
def test_a_transient_child_is_restarted_unless_it_ended_normally(kind: ExitKind) -> None:
    """A transient child is restarted unless it finished its work or did as it was told."""
    world = running(child("a", restart=RestartType.TRANSIENT))

    world.die("a", Exit(kind=kind))
    is_normal = kind in {ExitKind.NORMAL, ExitKind.STOPPED}
    assert world.wait(1.0) == ([] if is_normal else ["spawn a#2"])
    assert world.finished is None


@pytest.mark.parametrize("exit_", [NORMAL, SIGKILL])
def test_a_temporary_child_is_never_restarted(exit_: Exit) -> None:
    """A temporary child is never restarted; it is forgotten when it ends."""
    world = running(child("a", restart=RestartType.TEMPORARY), child("b"))

    world.die("a", exit_)
    assert world.wait(60.0) == []
    assert world.states() == {"b": ChildState.READY}
    assert world.reported(ReportKind.CHILD_ENDED) == [{"child": "a", "incarnation": 1, "reason": str(exit_)}]


def test_one_for_one_restarts_the_failed_child_alone() -> None:
    """With `one_for_one` the failed child is restarted alone."""
    world = running(*abc())

    assert world.die("b") == []
    assert world.die("a") == []
    assert world.wait(1.0) == ["spawn b#2", "spawn a#2"]


def test_one_for_all_restarts_everybody() -> None:
    """With `one_for_all` the others are stopped in reverse, then all are started in order."""
    world = running(*abc(), strategy=Strategy.ONE_FOR_ALL)

    assert world.die("b") == ["stop c#1"]
    assert world.die("c", STOPPED) == ["stop a#1"]
    assert world.die("a", STOPPED) == []
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.ready("a") == ["spawn b#2"]
    assert world.ready("b") == ["spawn c#2"]
    (report,) = world.reported(ReportKind.CHILD_RESTARTING)
    assert report == {"child": "b", "incarnation": 1, "delay_s": 1.0, "reason": "SIGKILL", "also": ["a", "c"]}


def test_one_for_all_stops_the_other_replicas_too() -> None:
    world = running(child("rank", replicas=3), strategy=Strategy.ONE_FOR_ALL)

    assert world.die("rank/1") == ["stop rank/0#1", "stop rank/2#1"]


def test_rest_for_one_restarts_those_declared_after_it() -> None:
    """With `rest_for_one` only the children declared after the failed one are stopped and started with it."""
    world = running(*abc(), strategy=Strategy.REST_FOR_ONE)

    assert world.die("b") == ["stop c#1"]
    assert world.die("c", STOPPED) == []
    assert world.wait(1.0) == ["spawn b#2"]
    assert world.ready("b") == ["spawn c#2"]


def test_no_replica_comes_after_another() -> None:
    """Replicas start together, so with `rest_for_one` none of them comes after another."""
    world = running(child("a", replicas=2), child("b"), strategy=Strategy.REST_FOR_ONE)

    assert world.die("a/0") == ["stop b#1"]


def test_a_shared_restart_begins_when_all_are_down_and_the_delay_is_over() -> None:
    """A shared restart begins when the last of them is gone and the back-off is over."""
    world = running(*abc(), strategy=Strategy.ONE_FOR_ALL)
    world.die("b")

    assert world.wait(2.0) == []  # the delay is over, `c` and `a` are not gone
    assert world.die("c", STOPPED) == ["stop a#1"]
    assert world.die("a", STOPPED) == ["spawn a#2"]


def test_deaths_that_follow_from_a_failure_are_not_counted() -> None:
    """Siblings that die before their turn to stop are part of the same failure and count for nothing."""
    world = running(child("rank", replicas=8), strategy=Strategy.ONE_FOR_ALL, intensity=Intensity(restarts=1))

    for rank in range(8):
        world.die(f"rank/{rank}")
    assert len(world.wait(1.0)) == 8
    assert world.finished is None


def test_a_second_failure_in_a_shared_restart_begins_it_again() -> None:
    world = running(*abc(), strategy=Strategy.REST_FOR_ONE)
    world.die("c")

    assert world.die("a") == ["stop b#1"]  # `c` waits no longer for itself
    assert world.die("b", STOPPED) == []
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.ready("a") == ["spawn b#2"]
    assert world.ready("b") == ["spawn c#2"]


def test_a_shared_restart_starts_ended_siblings_again() -> None:
    """A shared restart starts transient siblings again that had ended, and leaves out temporary ones."""
    world = running(
        child("a", restart=RestartType.TRANSIENT),
        child("b", restart=RestartType.TEMPORARY),
        child("c"),
        strategy=Strategy.ONE_FOR_ALL,
    )
    world.die("a", NORMAL)

    assert world.die("c") == ["stop b#1"]
    world.die("b", STOPPED)
    assert world.wait(1.0) == ["spawn a#2"]
    assert world.ready("a") == ["spawn c#2"]
    assert world.states().keys() == {"a", "c"}


def test_an_incarnation_never_repeats() -> None:
    """Incarnations count the starts of a name from 1 and never repeat, whoever restarts it."""
    world = running(tree(child("a"), name="inner", intensity=Intensity(restarts=1)))
    for incarnation in (2, 3):
        world.die("a")
        assert world.wait(9.0) == [f"spawn a#{incarnation}"]
        world.make_ready()
    world.send(RemoveChild(name="a"))
    world.die("a", STOPPED)
    world.new()

    assert world.send(AddChild(supervisor="inner", spec=child("a"))).new() == ["spawn a#4"]


def test_events_of_an_older_incarnation_change_nothing() -> None:
    """What is heard of an older incarnation, or of one already gone, is reported and changes nothing."""
    world = running(child("a"), child("b"))
    world.die("a")
    world.wait(1.0)

    world.send(Ready(name="a", incarnation=1))
    world.send(Gone(name="a", incarnation=1, exit=SIGKILL))
    world.send(InitFailed(name="nobody", incarnation=1, error=""))
    world.die("b")
    world.send(Gone(name="b", incarnation=1, exit=SIGKILL))

    assert world.new() == []
    assert world.states() == {"a": ChildState.STARTING, "b": ChildState.BACKING_OFF}
    assert [tuple(report.values()) for report in world.reported(ReportKind.STALE_EVENT)] == [
        ("a", 1, 2, "Ready"),
        ("a", 1, 2, "Gone"),
        ("nobody", 1, 0, "InitFailed"),
        ("b", 1, 1, "Gone"),
    ]


def test_news_that_cross_a_stop_change_nothing() -> None:
    world = play(child("a"))
    world.start()
    world.stop()

    assert world.ready("a") == []
    assert world.raise_in_init("a") == ["finished ok"]


# -- when: back-off ---------------------------------------------------------------------------------


def test_delays_double_up_to_a_cap() -> None:
    """The delay before a restart doubles with each failure in a row, from `base_s` to `cap_s`."""
    world = running(child("a"), intensity=Intensity(restarts=9))
    delays_s = []
    for _ in range(6):
        world.die("a")
        delays_s.append(world.delay_s())
        world.wait(delays_s[-1])
        world.make_ready()

    assert delays_s == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_stable_child_is_restarted_at_once() -> None:
    """A child that had been ready for `reset_after_s` is restarted at once, and its delays begin anew."""
    world = running(child("a"), intensity=Intensity(restarts=9))
    for _ in range(2):
        world.die("a")
        world.wait(4.0)
        world.make_ready()
    world.wait(STEADY.reset_after_s)

    world.die("a")
    assert world.delay_s() == 0.0
    assert world.wait(0.0) == ["spawn a#4"]
    world.make_ready()
    world.die("a")
    assert world.delay_s() == 1.0


def test_a_childs_own_backoff_wins() -> None:
    """A child's own back-off comes before its supervisor's."""
    world = running(child("a", backoff=Backoff(base_s=7.0, jitter_frac=0.0)))

    world.die("a")
    assert world.delay_s() == 7.0


def test_a_stop_overtakes_a_pending_restart() -> None:
    """A stop overtakes a pending restart: what waits to be started is not started."""
    world = running(*abc()[:2])
    world.die("b")

    assert world.stop() == ["stop a#1"]
    assert world.wait(5.0) == []
    assert world.die("a", STOPPED) == ["finished ok"]


def test_a_cancelled_timer_that_fires_late_does_nothing() -> None:
    world = running(*abc()[:2])
    world.die("b")
    (timer,) = world.timers
    world.stop()

    assert world.send(TimerFired(timer=timer)).new() == []


def test_a_start_over_its_time_is_killed() -> None:
    """A child that is not ready within `start_timeout_s` is killed and has failed to start."""
    world = running(child("a", start_timeout_s=30.0))
    world.die("a")
    world.wait(1.0)

    assert world.wait(29.9) == []
    assert world.wait(0.1) == ["kill a#2"]
    assert world.die("a") == []
    assert world.reported(ReportKind.CHILD_RESTARTING)[-1]["reason"] == "start timeout: not ready within 30 s"
    assert world.delay_s() == 2.0


def test_the_start_timeout_ends_when_it_is_ready() -> None:
    world = running(child("a", start_timeout_s=30.0))

    assert world.wait(31.0) == []
    assert world.reported(ReportKind.CHILD_READY) == [{"child": "a", "incarnation": 1, "after_s": 0.0}]


def test_an_actor_that_hangs_after_its_init_raised_is_killed() -> None:
    world = running(child("a", shutdown_s=5.0))
    world.die("a")
    world.wait(1.0)

    world.send(InitFailed(name="a", incarnation=2, error="ValueError: x"))
    assert world.new() == ["stop a#2"]
    assert world.wait(5.0) == ["kill a#2"]
    assert world.die("a") == []
    assert world.reported(ReportKind.CHILD_RESTARTING)[-1]["reason"] == "error: ValueError: x"


# -- when not: intensity and escalation -------------------------------------------------------------


def test_more_restarts_than_the_intensity_fail_the_supervisor() -> None:
    """One restart more than the intensity allows fails the supervisor; its children stop in reverse."""
    world = running(*abc(), intensity=Intensity(restarts=2, within_s=60.0))
    for _ in range(2):
        world.die("b")
        world.wait(4.0)
        world.make_ready()

    assert world.die("b", BUG) == ["stop c#1"]
    assert world.die("c", STOPPED) == ["stop a#1"]
    assert world.die("a", STOPPED) == ["finished failed"]
    assert world.finished.reason == (
        "`b` needed 3 restarts in 60 s (limit 2), so `run` stopped\n"
        "  first exit: SIGKILL, `b` incarnation 1\n"
        "  last exit: exit code 1: ValueError: bad row, `b` incarnation 3"
    )


def test_restarts_older_than_the_window_are_not_counted() -> None:
    """Restarts older than `within_s` are not counted."""
    world = running(child("a"), intensity=Intensity(restarts=1, within_s=60.0))
    for incarnation in range(2, 7):
        world.die("a")
        assert world.wait(60.1) == [f"spawn a#{incarnation}"]
        world.make_ready()


def test_an_intensity_of_0_allows_no_restart() -> None:
    world = running(child("a"), intensity=Intensity(restarts=0))

    assert world.die("a") == ["finished failed"]
    assert world.finished.reason.startswith("`a` needed 1 restart in 600 s (limit 0), so `run` stopped")


def test_a_failed_start_counts_as_a_restart() -> None:
    """A restart that fails to start counts like a failure of a child that ran."""
    world = running(child("a"), intensity=Intensity(restarts=2))
    world.die("a")
    for _ in range(2):
        world.wait(9.0)
        world.die("a")

    assert world.finished.reason.startswith("`a` needed 3 restarts in 600 s (limit 2)")


def test_the_restarts_of_all_children_count_together() -> None:
    """The restarts of all children of a supervisor count together, and the report says whose they were."""
    world = running(*abc(), intensity=Intensity(restarts=2))
    for name in "ab":
        world.die(name)
    world.wait(1.0)
    world.make_ready()

    world.die("a")
    world.die("c", STOPPED)
    world.die("b", STOPPED)
    assert world.finished.reason.startswith("`a` (2), `b` (1) needed 3 restarts in 600 s (limit 2), so")


def test_a_failed_supervisor_is_one_restart_for_its_parent() -> None:
    """A supervisor that failed is restarted by its parent like any child: one restart, all children new."""
    world = running(child("a"), tree(child("b"), child("c"), name="inner", intensity=Intensity(restarts=0)))

    assert world.die("b") == ["stop c#1"]
    assert world.die("c", STOPPED) == []
    assert world.wait(1.0) == ["spawn b#2"]
    assert world.ready("b") == ["spawn c#2"]
    reports = world.reported(ReportKind.CHILD_RESTARTING)
    assert [(report["child"], report["delay_s"]) for report in reports] == [("inner", 1.0)]


def test_a_restarted_supervisor_counts_from_0() -> None:
    """A restarted supervisor has made no restarts yet."""
    world = running(tree(child("b"), name="inner", intensity=Intensity(restarts=1)))
    for incarnation in range(2, 6):
        world.die("b")
        assert world.wait(60.0) == [f"spawn b#{incarnation}"]
        world.make_ready()
    assert [report["child"] for report in world.reported(ReportKind.CHILD_RESTARTING)] == [
        "b",
        "inner",
        "b",
        "inner",
    ]


def test_a_supervisor_that_cannot_be_restarted_fails_upward() -> None:
    """A supervisor that fails too often fails its parent, up to the root, where the run fails."""
    no_restart = Intensity(restarts=0)
    world = running(tree(child("a"), name="inner", intensity=no_restart), intensity=no_restart)

    assert world.die("a") == ["finished failed"]
    assert world.finished.reason == (
        "`inner` needed 1 restart in 600 s (limit 0), so `run` stopped\n"
        "  first exit: SIGKILL, `a` incarnation 1"
    )
    assert [report["supervisor"] for report in world.reported(ReportKind.ESCALATED)] == ["inner", "run"]


def test_the_same_init_error_twice_escalates_at_once() -> None:
    """An `__init__` that raises the same error twice in a row fails the supervisor at once."""
    world = running(child("a"), intensity=Intensity(restarts=9))
    world.die("a")
    world.wait(1.0)

    assert world.raise_in_init("a") == []
    world.wait(2.0)
    assert world.raise_in_init("a") == ["finished failed"]
    assert world.finished.reason == (
        "`a` failed twice with the same `__init__` error, so `run` stopped\n"
        "  first exit: SIGKILL, `a` incarnation 1\n"
        "  last exit: exit code 1: ValueError: bad row, `a` incarnation 3"
    )


def test_the_same_init_error_fails_every_level_once() -> None:
    """Each supervisor above gives it one more try, and not its whole intensity."""
    many = Intensity(restarts=9)
    world = running(tree(child("a"), name="inner", intensity=many), intensity=many)
    world.die("a")
    tries = 0
    while world.finished is None:
        world.wait(8.0)
        world.raise_in_init("a")
        tries += 1

    assert tries == 3
    assert world.finished.reason.startswith("`inner` failed twice with the same `__init__` error, so `run`")


def test_different_init_errors_do_not_escalate() -> None:
    """Different errors, or the same with a ready in between, are failures like others."""
    world = running(child("a"), intensity=Intensity(restarts=9))
    world.die("a")
    for error in ("ValueError: x", "ValueError: y", "ValueError: x"):
        world.wait(8.0)
        assert world.raise_in_init("a", error) == []
    world.wait(8.0)
    world.make_ready()
    world.die("a")
    world.wait(8.0)

    assert world.raise_in_init("a", "ValueError: x") == []


def test_a_supervisor_that_was_ready_in_between_may_meet_the_same_init_error() -> None:
    many = Intensity(restarts=9)
    world = running(tree(child("a"), name="inner", intensity=many), intensity=many)
    for _ in range(2):
        world.die("a")
        for _ in range(2):
            world.wait(8.0)
            world.raise_in_init("a")
        world.wait(8.0)
        world.make_ready()

    assert [report["supervisor"] for report in world.reported(ReportKind.ESCALATED)] == ["inner", "inner"]


def test_the_first_failure_leads_the_report() -> None:
    """The report leads with the first failure, however many follow it while the tree comes down."""
    world = running(*abc(), intensity=Intensity(restarts=0))
    world.die("b", Exit(kind=ExitKind.OOM, signal=9))

    world.die("a", BUG)
    world.die("c", SIGKILL)
    assert world.finished.first_cause.child == "b"
    assert world.finished.reason.splitlines()[1] == "  first exit: out of memory, `b` incarnation 1"


def test_a_stop_does_not_turn_a_failure_into_success() -> None:
    """A tree that is failing still fails when it is told to stop meanwhile."""
    world = running(*abc()[:2], intensity=Intensity(restarts=0))
    world.die("a")

    assert world.stop() == []
    assert world.die("b", STOPPED) == ["finished failed"]


# -- significant children ---------------------------------------------------------------------------


def significant(name: str, restart: RestartType = RestartType.TRANSIENT, **options) -> ChildSpec:
    return child(name, significant=True, restart=restart, **options)


def test_any_significant_child_ends_its_supervisor() -> None:
    """With auto_shutdown `any` the first significant child that ends well ends its supervisor, and well."""
    world = running(significant("a", replicas=2), child("b"), auto_shutdown="any")

    assert world.die("a/0", NORMAL) == ["stop b#1"]
    assert world.die("b", STOPPED) == ["stop a/1#1"]
    assert world.die("a/1", STOPPED) == ["finished ok"]
    assert world.finished == Finished(outcome="ok", reason="significant `a/0` ended normally")


def test_the_last_significant_child_ends_its_supervisor() -> None:
    """With auto_shutdown `all` the last of them does."""
    world = running(significant("a", replicas=2), child("b"), auto_shutdown="all")

    assert world.die("a/0", NORMAL) == []
    assert world.die("a/1", NORMAL) == ["stop b#1"]


def test_a_significant_child_that_fails_is_restarted() -> None:
    """A significant child that fails is restarted as its restart type says."""
    world = running(significant("a"), auto_shutdown="any")

    world.die("a", SIGKILL)
    assert world.wait(1.0) == ["spawn a#2"]


def test_a_significant_temporary_child_that_fails_fails_its_supervisor() -> None:
    """A significant temporary child that fails, fails its supervisor: a failure never ends a run well."""
    world = running(significant("a", RestartType.TEMPORARY), child("b"), auto_shutdown="any")

    assert world.die("a", BUG) == ["stop b#1"]
    assert world.die("b", STOPPED) == ["finished failed"]
    assert world.finished.reason.startswith(
        "`a` is significant and failed, so `run` stopped\n  first exit: exit code 1"
    )


def test_a_significant_supervisor_ends_the_run() -> None:
    """A supervisor can be significant too, and ends normally when its own significant children have."""
    ranks = tree(
        significant("rank", replicas=2),
        name="trainer",
        auto_shutdown="all",
        restart=RestartType.TRANSIENT,
        significant=True,
    )
    world = running(child("queue"), ranks, auto_shutdown="any")

    world.die("rank/1", NORMAL)
    assert world.die("rank/0", NORMAL) == ["stop queue#1"]
    assert world.die("queue", STOPPED) == ["finished ok"]


def test_a_permanent_supervisor_that_ended_normally_is_restarted() -> None:
    ranks = tree(significant("rank"), name="trainer", auto_shutdown="any")
    world = running(ranks)

    world.die("rank", NORMAL)
    assert world.wait(1.0) == ["spawn rank#2"]


# -- children that come and go ----------------------------------------------------------------------


def test_a_child_can_be_added() -> None:
    """A child can be added to a supervisor that runs; it starts at once and comes last in the order."""
    world = running(child("a"), child("b"))

    assert world.send(AddChild(supervisor="run", spec=child("c", replicas=2))).new() == [
        "spawn c/0#1",
        "spawn c/1#1",
    ]
    world.make_ready()
    assert world.stop() == ["stop c/0#1", "stop c/1#1"]


def test_a_child_added_while_others_start_waits_for_its_turn() -> None:
    world = play(child("a"))
    world.start()

    assert world.send(AddChild(supervisor="run", spec=child("c"))).new() == []
    assert world.ready("a") == ["spawn c#1"]
    assert world.die("c") == []  # refused, and nobody else's problem
    assert world.states() == {"a": ChildState.READY}


def test_an_added_child_that_does_not_start_is_refused() -> None:
    """An added child that fails to start is reported and forgotten, and is nobody else's failure."""
    world = running(child("a"), strategy=Strategy.ONE_FOR_ALL)
    world.send(AddChild(supervisor="run", spec=child("c", replicas=2)))
    world.new()

    assert world.raise_in_init("c/1") == ["stop c/0#1"]
    assert world.die("c/0", STOPPED) == []
    assert world.states() == {"a": ChildState.READY}
    assert world.reported(ReportKind.CHILD_REFUSED) == [
        {
            "child": "c",
            "supervisor": "run",
            "reason": "`c/1` did not start: exit code 1: ValueError: bad row",
        }
    ]


def test_an_added_child_is_supervised_once_it_was_ready() -> None:
    world = running(child("a"))
    world.send(AddChild(supervisor="run", spec=child("c")))
    world.make_ready()

    world.die("c")
    assert world.wait(1.0) == ["spawn c#2"]
    assert world.die("c") == []
    assert world.wait(2.0) == ["spawn c#3"]


def test_a_supervisor_can_be_added() -> None:
    world = running(child("a"))

    assert world.send(AddChild(supervisor="run", spec=tree(child("c"), name="more"))).new() == ["spawn c#1"]
    assert world.send(AddChild(supervisor="more", spec=child("d"))).new() == []
    assert world.ready("c") == ["spawn d#1"]


def test_added_children_are_forgotten_when_their_supervisor_restarts() -> None:
    """A supervisor restarts with the children of its spec: added ones are forgotten, removed ones back."""
    world = running(tree(child("a"), child("b"), name="inner", intensity=Intensity(restarts=0)))
    world.send(AddChild(supervisor="inner", spec=child("c"))).make_ready()
    world.send(RemoveChild(name="a"))
    world.die("a", STOPPED)

    world.die("b")
    world.die("c", STOPPED)
    assert world.wait(1.0) == ["spawn a#2"]
    world.make_ready()
    assert world.states().keys() == {"a", "b"}


def test_a_child_can_be_removed() -> None:
    """An actor, all replicas of a child, or a supervisor can be removed: stopped, and forgotten once gone."""
    world = running(child("a", replicas=3), tree(child("b"), name="inner"))

    assert world.send(RemoveChild(name="a/1")).new() == ["stop a/1#1"]
    assert world.die("a/1", STOPPED) == []
    assert world.send(RemoveChild(name="a")).new() == ["stop a/0#1", "stop a/2#1"]
    assert world.send(RemoveChild(name="inner")).new() == ["stop b#1"]
    for name in ("a/0", "a/2", "b"):
        assert world.die(name, STOPPED) == []
    assert world.states() == {}
    assert world.stop() == ["finished ok"]


def test_removing_what_waits_for_a_restart_calls_it_off() -> None:
    """To remove what waits for a restart calls the restart off."""
    world = running(child("a"), child("b"))
    world.die("a")

    assert world.send(RemoveChild(name="a")).new() == []
    assert world.wait(5.0) == []
    assert world.states() == {"b": ChildState.READY}


def test_removing_what_holds_up_a_start_lets_it_go_on() -> None:
    world = play(child("a"), child("b"))
    world.start()
    world.send(RemoveChild(name="a"))

    assert world.die("a", STOPPED)[-1:] == ["spawn b#1"]


def test_a_removal_waits_for_a_stop_under_way() -> None:
    world = running(child("a"), child("b"))
    world.stop()

    assert world.send(RemoveChild(name="a")).new() == []
    assert world.die("b", STOPPED) == ["stop a#1"]


def test_a_stop_waits_for_a_removal_under_way() -> None:
    world = running(child("a"))
    world.send(RemoveChild(name="a")).new()

    assert world.stop() == []
    assert world.die("a", STOPPED) == ["finished ok"]


def test_nothing_is_added_to_a_supervisor_that_stops() -> None:
    """Nothing is added to a supervisor that is not running; the refusal is reported."""
    world = running(child("a"), tree(child("b"), name="inner", intensity=Intensity(restarts=0)))
    world.die("b")  # `inner` waits for its restart

    assert world.send(AddChild(supervisor="inner", spec=child("c"))).new() == []
    world.stop()
    assert world.send(AddChild(supervisor="run", spec=child("c"))).new() == []
    assert [report["reason"] for report in world.reported(ReportKind.CHILD_REFUSED)] == [
        "`inner` is backing_off",
        "`run` is stopping",
    ]


@pytest.mark.parametrize(
    ("event", "where"),
    [
        (AddChild(supervisor="nobody", spec=child("c")), "nobody"),
        (AddChild(supervisor="run", spec=child("a")), "a"),
        (AddChild(supervisor="run", spec=child("b")), "b"),
        (AddChild(supervisor="run", spec=tree(child("c"), child("c"), name="more")), "c"),
        (AddChild(supervisor="run", spec=child("c", replicas=0)), "c.replicas"),
        (AddChild(supervisor="run", spec=child("")), "child.id"),
        (RemoveChild(name="run"), "run"),
        (RemoveChild(name="c"), "c"),
    ],
)
def test_a_senseless_wish_raises_and_changes_nothing(event, where: str) -> None:
    """A wish that makes no sense, such as an id used twice, raises and changes nothing."""
    world = running(child("a"), tree(child("b"), name="inner"))
    before = world.policy.snapshot()

    with pytest.raises(SpecError) as caught:
        world.send(event)
    assert caught.value.where == where
    assert world.policy.snapshot() == before


def test_an_id_removed_elsewhere_stays_reserved() -> None:
    world = running(child("a"), tree(child("b"), name="inner"))
    world.send(RemoveChild(name="b"))
    world.die("b", STOPPED)

    with pytest.raises(SpecError):  # `inner` brings it back when it restarts
        world.send(AddChild(supervisor="run", spec=child("b")))
    assert world.send(AddChild(supervisor="inner", spec=child("b"))).new() == ["spawn b#2"]


# -- seeing it --------------------------------------------------------------------------------------


def test_a_snapshot_shows_the_whole_tree() -> None:
    world = running(tree(child("a"), name="inner"))
    world.die("a")
    world.wait(1.0)

    root = world.policy.snapshot()
    inner = root.children[0]
    actor = inner.children[0]
    assert (root.name, root.state, root.is_supervisor) == ("run", ChildState.READY, True)
    assert (inner.name, inner.incarnation, inner.restarts, inner.last_exit) == ("inner", 1, 0, "")
    assert (actor.name, actor.state, actor.incarnation, actor.restarts) == ("a", ChildState.STARTING, 2, 1)
    assert actor.last_exit == "SIGKILL"
    assert world.policy.root_id == "run"


@pytest.mark.parametrize(
    ("exit_", "text"),
    [
        (SIGKILL, "SIGKILL"),
        (BUG, "exit code 1: ValueError: bad row"),
        (Exit(kind=ExitKind.SIGNAL, signal=60), "signal 60"),
        (Exit(kind=ExitKind.SIGNAL), "killed by a signal"),
        (Exit(kind=ExitKind.ERROR), "error"),
        (Exit(kind=ExitKind.OOM, signal=9), "out of memory"),
        (Exit(kind=ExitKind.LEASE, detail="node7"), "host lost: node7"),
    ],
)
def test_an_exit_reads_as_a_person_would_say_it(exit_: Exit, text: str) -> None:
    assert str(exit_) == text
