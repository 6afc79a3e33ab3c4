"""Hooks, hangs, spares, monitors, links and stop deadlines, with real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from sample_actors import Counter
from supervised_actors import PoisonedError, Worker
from watching import QUICK, ended_after, events_of, eventually

from relax_actor import Backoff, ChildSpec, Decision, Failure, Intensity, Supervisor, SupervisorSpec
from relax_actor.actor.page import PageView
from relax_actor.errors import ActorDied, RemoteError
from relax_actor.supervision.spec import SpecError
from transport.shm import ShmSpace


def spec_of(*children, **fields):
    return SupervisorSpec(id="root", **{"backoff": QUICK, "children": children, **fields})


def worker(**options):
    return ChildSpec(**{"id": "worker", "actor": Worker, **options})


def first_event(tree, kind):
    """Return the first event of a kind; callers may hear of a death before it is written down."""
    eventually(lambda: events_of(tree, kind))
    return events_of(tree, kind)[0]


def incarnation(tree, name="worker"):
    return tree.ref(name, Worker).within(20).ask(Worker.who).result()[1]


# -- hangs ------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("how", ["limited", "limited_async", "stop_in_it", "hang_with_the_gil"])
def test_a_method_over_its_max_runtime_is_a_hang(tmp_path, how):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree:
        method = getattr(Worker, how)
        with pytest.raises(ActorDied):  # and no CallTimeout
            tree.ref("worker", Worker).ask(method, *([600.0] if "limited" in how else [])).result()
        assert incarnation(tree) == 2
        event = first_event(tree, "child_restarting")
    assert event["reason"] == f"hung: {how} ran longer than its max_runtime_s of 0.5 s"


@pytest.mark.fault
def test_the_stacks_of_a_hung_actor_are_in_its_log(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree:
        with pytest.raises(ActorDied):
            tree.ref("worker", Worker).ask(Worker.limited, 600.0).result()
        stacks = (tmp_path / "logs" / "worker-1.log").read_text()
    assert "in limited" in stacks
    assert "Current thread" in stacks


def test_a_limited_method_in_time_is_answered(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree:
        ref = tree.ref("worker", Worker)
        for _ in range(5):
            assert ref.ask(Worker.limited_amply, 0.05).result() == "in time"
        assert ref.ask(Worker.limited_amply_async, 0.05).result() == "in time"
        time.sleep(3.0)  # a forgotten limit would run out
        assert incarnation(tree) == 1


@pytest.mark.fault
def test_who_is_busy_without_progress_hangs_and_who_reports_progress_does_not(tmp_path):
    with Supervisor(spec_of(worker(hang_after_s=2.5)), run_dir=tmp_path) as tree:
        ref = tree.ref("worker", Worker)
        assert ref.ask(Worker.work, 5.0, report=True).result() == "done"
        time.sleep(3.0)  # idle is not busy
        assert incarnation(tree) == 1
        with pytest.raises(ActorDied):
            ref.ask(Worker.work, 600.0, report=False).result()
        event = first_event(tree, "child_restarting")
    assert event["reason"] == "hung: busy with work (still at it) without progress for 2.5 s"


@pytest.mark.fault
def test_who_is_stopped_as_soon_as_it_is_busy_hangs(tmp_path):
    with Supervisor(spec_of(worker(hang_after_s=0.5)), run_dir=tmp_path) as tree:
        with pytest.raises(ActorDied):
            tree.ref("worker", Worker).ask(Worker.stop).result()
        event = first_event(tree, "child_restarting")
    assert event["reason"] == "hung: busy with stop without progress for 0.5 s"


@pytest.mark.fault
def test_who_holds_the_gil_is_neither_suspected_nor_unkillable(tmp_path):
    with Supervisor(spec_of(worker(hang_after_s=30.0, shutdown_s=0.5)), run_dir=tmp_path) as tree:
        ref = tree.ref("worker", Worker)
        assert ref.ask(Worker.hold_the_gil, 10).result() == "done"
        assert incarnation(tree) == 1
        pid = tree.pid("worker")
        ref.tell(Worker.hold_the_gil, 600)
        space = ShmSpace(tree.run_id)
        eventually(lambda: PageView.read(space, "worker", 1).method == "hold_the_gil")
    assert not psutil.pid_exists(pid)
    assert tree.wait(0).killed == ("worker#1",)


# -- what follows from a failure --------------------------------------------------------------------


@pytest.mark.fault
def test_the_hook_is_called_once_for_each_incarnation_that_failed(tmp_path):
    seen: list[Failure] = []
    spec = spec_of(worker(), ChildSpec(id="other", actor=Counter))
    with Supervisor(spec, run_dir=tmp_path, on_failure=seen.append) as tree:
        for expected in (2, 3):
            os.kill(tree.pid("worker"), signal.SIGKILL)
            eventually(lambda expected=expected: incarnation(tree) == expected)
        assert seen[0].ref.ask(Worker.who).result()[1] == 3
    assert [(each.child, each.incarnation, str(each.exit), each.restarts) for each in seen] == [
        ("worker", 1, "SIGKILL", 0),
        ("worker", 2, "SIGKILL", 1),
    ]


@pytest.mark.fault
def test_the_hook_can_restart_what_is_never_restarted_and_leave_down_what_always_is(tmp_path):
    def decide(failure: Failure) -> Decision:
        return Decision.RESTART if failure.child == "brief" else Decision.IGNORE

    spec = spec_of(worker(), worker(id="brief", restart="temporary"), worker(id="third"))
    with Supervisor(spec, run_dir=tmp_path, on_failure=decide) as tree:
        for name in ("worker", "brief"):
            os.kill(tree.pid(name), signal.SIGKILL)
        eventually(lambda: incarnation(tree, "brief") == 2)
        eventually(lambda: events_of(tree, "child_ended"))
        assert tree.pid("worker") is None
        assert incarnation(tree, "third") == 1


def _raise(failure: Failure) -> Decision:
    raise ValueError("cannot say") from KeyError(failure.child)


@pytest.mark.fault
def test_a_hook_that_raises_escalates_with_the_chain(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path, on_failure=_raise) as tree:
        os.kill(tree.pid("worker"), signal.SIGKILL)
        finished = tree.wait(20)
    assert finished.outcome == "failed"
    assert (
        "on_failure escalates (it raised ValueError: cannot say, from KeyError: 'worker')" in finished.reason
    )


@pytest.mark.fault
def test_a_hook_that_does_not_answer_leaves_the_decision_to_the_rules(tmp_path):
    def think(_failure: Failure) -> None:
        time.sleep(60)

    with Supervisor(spec_of(worker()), run_dir=tmp_path, on_failure=think, on_failure_s=0.2) as tree:
        os.kill(tree.pid("worker"), signal.SIGKILL)
        eventually(lambda: incarnation(tree) == 2)
        assert len(events_of(tree, "hook_late")) == 1


@pytest.mark.fault
def test_a_fatal_error_fails_its_call_and_ends_the_actor(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree:
        ref = tree.ref("worker", Worker)
        with pytest.raises(PoisonedError) as caught:
            ref.ask(Worker.poison).result()
        assert isinstance(caught.value, RemoteError)
        assert ref.ask(Worker.who).result()[1] == 2
        event = first_event(tree, "child_restarting")
    assert event["reason"].endswith("PoisonedError: it cannot go on")


@pytest.mark.fault
def test_a_device_lost_twice_in_a_row_is_not_tried_a_third_time(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree:
        for expected in (1, 2):
            eventually(lambda expected=expected: incarnation(tree) == expected)
            with pytest.raises(PoisonedError):
                tree.ref("worker", Worker).ask(Worker.lose_the_device).result()
        finished = tree.wait(20)
    assert "`worker` lost its device 2 times in a row" in finished.reason
    assert "device lost" in finished.reason


# -- spares -----------------------------------------------------------------------------------------


@pytest.mark.fault
def test_a_spare_takes_over_at_once_under_the_name_and_next_incarnation_of_the_dead(tmp_path):
    spec = spec_of(worker(spares=1, replicas=2), backoff=Backoff(base_s=60.0))
    others = psutil.Process().children(recursive=True)  # servers of tests before this one
    with Supervisor(spec, run_dir=tmp_path) as tree:
        eventually(lambda: len(events_of(tree, "spare_ready")) == 1)
        (spare,) = tree.status().spares
        spare_pid = tree.pid(spare)
        os.kill(tree.pid("worker/1"), signal.SIGKILL)
        eventually(lambda: tree.pid("worker/1") == spare_pid)  # long before the back-off is over
        who = tree.ref("worker/1", Worker).ask(Worker.who).result()
        assert who == (spare_pid, 2, "worker/SPARE/1", "worker/1#2")
        assert (tmp_path / "logs" / "worker-1-2.log").exists()
        eventually(lambda: len(events_of(tree, "spare_ready")) == 2)
        os.kill(spare_pid, signal.SIGKILL)
        assert tree.ref("worker/1", Worker).within(20).ask(Worker.who).result()[1:3] == (3, "worker/SPARE/2")
        pids = [tree.pid(f"worker/{index}") for index in range(2)]
        assert [event["spare"] for event in events_of(tree, "restart_by_spare")] == [
            "worker/SPARE/1",
            "worker/SPARE/2",
        ]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert set(psutil.Process().children(recursive=True)) <= set(others)


@pytest.mark.fault
def test_a_spare_that_dies_is_replaced_and_is_nobodys_failure(tmp_path):
    with Supervisor(spec_of(worker(spares=1)), run_dir=tmp_path) as tree:
        eventually(lambda: events_of(tree, "spare_ready"))
        os.kill(tree.pid("worker/SPARE/1"), signal.SIGKILL)
        eventually(lambda: len(events_of(tree, "spare_ready")) == 2)
        assert incarnation(tree) == 1
        assert not events_of(tree, "child_restarting")


# -- monitors and links -----------------------------------------------------------------------------


@pytest.mark.fault
def test_a_monitor_tells_every_incarnation_in_order_with_one_end_each(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree:
        monitor = tree.monitor("worker")
        os.kill(tree.pid("worker"), signal.SIGKILL)
        eventually(lambda: incarnation(tree) == 2)
    said = [str(each) for each in monitor if "dying" not in str(each)]
    assert said == [
        "worker#1 up",
        "worker#1 ready",
        "worker#1 gone (SIGKILL)",
        "worker#2 up",
        "worker#2 ready",
        "worker#2 gone (stopped)",
    ]


def test_a_monitor_of_who_is_not_there_ends_at_once(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree, tree.monitor("nobody") as monitor:
        assert str(monitor.next(20.0)) == "nobody#0 gone (noproc)"


async def _watch(tree):
    said = []
    async for seen in tree.monitor("worker"):
        said.append(str(seen))
        if len(said) == 2:
            tree.stop()
        if "gone" in said[-1]:
            break
    return said


def test_a_monitor_can_be_awaited(tmp_path):
    with Supervisor(spec_of(worker()), run_dir=tmp_path) as tree:
        said = asyncio.run(_watch(tree))
    assert said[-1] == "worker#1 gone (stopped)"


@pytest.mark.fault
def test_linked_actors_share_their_fate_both_ways(tmp_path):
    spec = spec_of(worker(id="a"), worker(id="b"), worker(id="c"), intensity=Intensity(restarts=9))
    with Supervisor(spec, run_dir=tmp_path) as tree:
        tree.link("a", "b")
        os.kill(tree.pid("a"), signal.SIGKILL)
        eventually(lambda: (incarnation(tree, "a"), incarnation(tree, "b")) == (2, 2))
        eventually(lambda: tree.pid("b") is not None)
        os.kill(tree.pid("b"), signal.SIGKILL)
        eventually(lambda: (incarnation(tree, "a"), incarnation(tree, "b")) == (3, 3))
        assert incarnation(tree, "c") == 1
        with pytest.raises(SpecError, match="no actor of this tree"):
            tree.link("a", "nobody")


# -- stopping ---------------------------------------------------------------------------------------


@pytest.mark.fault
def test_a_stop_ends_at_its_total_deadline_and_says_who_was_killed(tmp_path):
    spec = spec_of(*(worker(id=name, shutdown_s=60.0) for name in "abc"))
    with Supervisor(spec, run_dir=tmp_path, stop_total_s=4.0) as tree:
        os.kill(tree.pid("b"), signal.SIGSTOP)
    finished = tree.wait(0)
    assert finished.outcome == "ok"
    assert sorted(finished.killed) == ["a#1", "b#1"]


EMBEDDING = """
    import json, signal, sys, time
    from pathlib import Path
    from supervised_actors import Worker
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        shutdown_s = float(sys.argv[1])
        worker = ChildSpec(id="worker", actor=Worker, shutdown_s=shutdown_s)
        spec = SupervisorSpec(id="root", children=(worker,))
        with Supervisor(spec, run_dir=Path(sys.argv[2])) as tree:
            reply = tree.ref("worker", Worker).within(600).ask(Worker.work, 600.0, report=False)
            print(json.dumps(tree.pid("worker")), flush=True)
            reply.result()
"""


@pytest.mark.fault
@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_in_a_blocked_call_ends_the_tree_in_bounded_time(tmp_path, interrupts):
    """Once: within the children's `shutdown_s`. Twice: now, and not in ten minutes."""
    script = tmp_path / "embed.py"
    script.write_text(textwrap.dedent(EMBEDDING))
    support = Path(__file__).parents[1] / "support"
    paths = [str(support), *filter(None, [os.environ.get("PYTHONPATH")])]
    program = subprocess.Popen(
        [sys.executable, str(script), "1.0" if interrupts == 1 else "600.0", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    with ended_after(program):
        pid = int(program.stdout.readline())
        program.send_signal(signal.SIGINT)
        if interrupts == 2:
            events = tmp_path / "run" / "events.jsonl"
            eventually(lambda: "supervisor_stopping" in events.read_text())
            program.send_signal(signal.SIGINT)
        error = program.stderr.read()
        code = program.wait(30)
    assert "KeyboardInterrupt" in error
    assert code != 0
    assert not psutil.pid_exists(pid)


@pytest.mark.fault
def test_ctrl_c_while_the_tree_is_told_to_stop_leaves_nothing(tmp_path, monkeypatch):
    """The second one may come before anybody waits for the end."""
    tree = Supervisor(spec_of(worker(shutdown_s=600.0)), run_dir=tmp_path)
    stop = tree.stop

    def stop_and_be_interrupted(reason):
        stop(reason)
        raise KeyboardInterrupt

    monkeypatch.setattr(tree, "stop", stop_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt), tree:
        pid = tree.pid("worker")
    assert tree.wait(0) is not None
    assert not psutil.pid_exists(pid)
