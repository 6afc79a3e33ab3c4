"""The supervisor shell with real processes: start, restart, stop, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest
from sample_actors import Counter
from watching import QUICK, ended_after, eventually

from relax_actor import ChildSpec, Intensity, Strategy, Supervisor, SupervisorSpec
from relax_actor.errors import StartFailed
from relax_actor.supervision.spec import SpecError
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace


def spec_of(*children, **fields):
    return SupervisorSpec(id="root", backoff=QUICK, children=children, **fields)


def socket_dirs(run_id):
    return list(Path(tempfile.gettempdir()).glob(f"rx-*/{run_id}"))


def kinds(tree):
    return [event["kind"] for event in read_events(tree.run_dir / "events.jsonl")[0]]


def test_leaving_the_block_leaves_no_process_socket_or_segment(tmp_path):
    with Supervisor(spec_of(ChildSpec(id="counter", actor=Counter, replicas=3)), run_dir=tmp_path) as tree:
        pids = [tree.pid(f"counter/{index}") for index in range(3)]
        space = ShmSpace(tree.run_id)
        space.create("somebody", 1, "left", 100).close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert space.names() == []
    assert not socket_dirs(tree.run_id)


def test_a_bad_spec_is_refused_before_anything_starts():
    with pytest.raises(SpecError, match="replicas"):
        Supervisor(spec_of(ChildSpec(id="counter", actor=Counter, replicas=0)))


def test_a_constructor_that_raises_is_tried_again_once_and_named(tmp_path):
    bad = ChildSpec(id="counter", actor="sample_actors:Nobody")
    tree = Supervisor(spec_of(bad), run_dir=tmp_path)
    others = psutil.Process().children(recursive=True)  # servers of tests before this one
    with pytest.raises(StartFailed, match="has no attribute 'Nobody'"), tree:
        pass
    assert set(psutil.Process().children(recursive=True)) <= set(others)


def test_a_strategy_one_for_all_restarts_the_others(tmp_path):
    spec = spec_of(
        ChildSpec(id="first", actor=Counter),
        ChildSpec(id="second", actor=Counter),
        strategy=Strategy.ONE_FOR_ALL,
    )
    with Supervisor(spec, run_dir=tmp_path) as tree:
        before = tree.pid("first")
        os.kill(tree.pid("second"), signal.SIGKILL)
        eventually(lambda: tree.ref("first", Counter).ask(Counter.where).result()[1] == 2)
        assert tree.pid("first") != before


def test_too_many_restarts_end_the_tree_with_the_first_cause(tmp_path):
    spec = spec_of(ChildSpec(id="counter", actor=Counter), intensity=Intensity(restarts=2, within_s=60))
    with Supervisor(spec, run_dir=tmp_path) as tree:
        for _ in range(3):
            eventually(lambda: tree.pid("counter") is not None)
            pid = tree.pid("counter")
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: tree.pid("counter") != pid or tree.wait(0) is not None)  # noqa: B023
        finished = tree.wait(30)
    assert finished.outcome == "failed"
    assert "SIGKILL" in finished.reason
    assert "counter" in finished.reason


def test_children_come_and_go_while_the_tree_runs(tmp_path):
    with Supervisor(spec_of(ChildSpec(id="counter", actor=Counter)), run_dir=tmp_path) as tree:
        tree.add_child("root", ChildSpec(id="extra", actor=Counter, args={"start": 1}))
        assert tree.ref("extra", Counter).ask(Counter.add, 1).result() == 2
        pid = tree.pid("extra")
        tree.remove_child("extra")
        eventually(lambda: not psutil.pid_exists(pid))
        assert tree.ref("counter", Counter).ask(Counter.add, 1).result() == 1
        with pytest.raises(SpecError):
            tree.add_child("nobody", ChildSpec(id="other", actor=Counter))


def test_the_death_line_says_who_when_how_and_where_the_log_is(tmp_path):
    with Supervisor(spec_of(ChildSpec(id="counter", actor=Counter)), run_dir=tmp_path) as tree:
        pid = tree.pid("counter")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: "child_exited" in kinds(tree))
        events, _ = read_events(tree.run_dir / "events.jsonl")
    line = next(event["line"] for event in events if event["kind"] == "child_exited")
    assert line.startswith(f"counter (incarnation 1, pid {pid}) died: SIGKILL")
    assert str(tmp_path / "logs" / "counter-1.log") in line


@pytest.mark.fault
def test_the_death_of_the_node_agent_is_the_death_of_its_actors_and_they_come_back(tmp_path):
    with Supervisor(spec_of(ChildSpec(id="counter", actor=Counter)), run_dir=tmp_path) as tree:
        counter = tree.ref("counter", Counter)
        grandchild = counter.ask(Counter.spawn_child).result()
        before = tree.pid("counter")
        agent = psutil.Process(before).parent()
        agent.kill()
        eventually(lambda: not psutil.pid_exists(before))
        assert counter.within(20).ask(Counter.where).result()[1] == 2
        eventually(lambda: not psutil.pid_exists(grandchild))


HEAD = """
    import json, sys, time
    from sample_actors import Counter
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec
    from transport.shm import ShmSpace

    if __name__ == "__main__":
        spec = SupervisorSpec(id="root", children=(ChildSpec(id="counter", actor=Counter, replicas=2),))
        with Supervisor(spec, run_dir=None) as tree:
            child = tree.ref("counter/0", Counter).ask(Counter.spawn_child).result()
            ShmSpace(tree.run_id).create("somebody", 1, "left", 4096)
            pids = [tree.pid("counter/0"), tree.pid("counter/1"), child]
            print(json.dumps({"run_id": tree.run_id, "pids": pids}), flush=True)
            time.sleep(600)
"""


@pytest.mark.fault
def test_a_killed_head_leaves_no_process_and_no_segment(tmp_path):
    """Invariant I8, by the hardest end."""
    script = tmp_path / "head.py"
    script.write_text(textwrap.dedent(HEAD))
    support = Path(__file__).parents[1] / "support"
    head = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(support)},
    )
    with ended_after(head):
        said = json.loads(head.stdout.readline())
        agent = psutil.Process(said["pids"][0]).parent()
        family = [agent, *agent.children(recursive=True)]
        head.kill()
    eventually(lambda: not any(process.is_running() for process in family))
    assert not any(psutil.pid_exists(pid) for pid in said["pids"])
    eventually(lambda: ShmSpace(said["run_id"]).names() == [])
    eventually(lambda: not socket_dirs(said["run_id"]))
