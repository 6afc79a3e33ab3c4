"""Births that overlap, zygotes that die, and runs of which everything is killed at one moment."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest
from dying_actors import Mortal
from watching import descriptors_of, eventually

from relax_actor import Backoff, ChildSpec, Supervisor, SupervisorSpec
from relax_actor.node import cgroup
from transport.shm import other_runs

pytestmark = pytest.mark.fault

SHM_ROOT = "/dev/shm"  # noqa: S108 - that is where shared memory is

QUICK = Backoff(base_s=0.01, cap_s=0.05)
SUPPORT = str(Path(__file__).parents[1] / "support")


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def tree(tmp_path):
    child = ChildSpec(id="mortal", actor=Mortal)
    with Supervisor(SupervisorSpec(id="root", backoff=QUICK, children=(child,)), run_dir=tmp_path) as tree:
        yield tree


def zygote_of(tree):
    pid = tree.pid("mortal")
    agent = psutil.Process(pid).parent()
    return next(child for child in agent.children() if child.pid != pid)


def test_actors_ordered_together_are_all_born(tree):
    tree.add_child("root", ChildSpec(id="many", actor=Mortal, replicas=20))
    refs = [tree.ref(f"many/{replica}", Mortal) for replica in range(20)]
    wheres = [reply.result(60) for reply in [ref.ask(Mortal.where, timeout_s=60) for ref in refs]]
    assert len({pid for pid, _ in wheres}) == 20
    assert [ref.name for ref in refs if tree.pid(ref.name) is None] == []


def test_an_actor_that_is_removed_before_it_is_born_does_not_live(tree):
    agent = psutil.Process(tree.pid("mortal")).parent()
    zygote = zygote_of(tree)
    zygote.suspend()  # so that the order of its death is there before it is born
    tree.add_child("root", ChildSpec(id="early", actor=Mortal))
    tree.remove_child("early")
    assert tree.ref("mortal", Mortal).ask(Mortal.one).result() == 1
    zygote.resume()
    eventually(lambda: {each.pid for each in agent.children()} == {tree.pid("mortal"), zygote.pid})
    eventually(lambda: [child.name for child in tree.status().children] == ["mortal"])


def test_a_birth_outlives_the_zygote_it_was_ordered_from(tree):
    zygote = zygote_of(tree)
    zygote.suspend()
    tree.add_child("root", ChildSpec(id="late", actor=Mortal))
    late = tree.ref("late", Mortal).ask(Mortal.one, timeout_s=30)
    zygote.kill()
    assert late.result() == 1


def test_a_zygote_that_died_idle_is_replaced_when_it_is_needed(tree):
    zygote = zygote_of(tree)
    zygote.kill()
    eventually(lambda: is_gone(zygote.pid))
    tree.add_child("root", ChildSpec(id="late", actor=Mortal))
    assert tree.ref("late", Mortal).ask(Mortal.one, timeout_s=30).result() == 1


def test_a_slow_birth_delays_nobodys_death(tree):
    zygote = zygote_of(tree)
    zygote.suspend()
    tree.add_child("root", ChildSpec(id="late", actor=Mortal))
    reply = tree.ref("mortal", Mortal).ask(Mortal.hang)
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    with pytest.raises(Exception, match="SIGKILL"):
        reply.result(20)
    zygote.resume()
    assert tree.ref("late", Mortal).ask(Mortal.one, timeout_s=30).result() == 1


def test_a_zygote_that_stands_still_does_not_keep_the_tree_from_ending(tree):
    zygote = zygote_of(tree)
    zygote.suspend()
    tree.add_child("root", ChildSpec(id="late", actor=Mortal, shutdown_s=0.1))
    tree.close()
    assert is_gone(zygote.pid)


def test_a_zygote_that_stands_still_over_who_is_to_die_is_replaced_for_the_others(tree):
    zygote = zygote_of(tree)
    zygote.suspend()
    tree.add_child("root", ChildSpec(id="early", actor=Mortal, shutdown_s=0.1))
    tree.add_child("root", ChildSpec(id="late", actor=Mortal))
    tree.remove_child("early")
    assert tree.ref("late", Mortal).ask(Mortal.one, timeout_s=60).result() == 1
    assert is_gone(zygote.pid)
    eventually(lambda: [child.name for child in tree.status().children] == ["mortal", "late"])


def test_nothing_is_said_of_python_in_the_agents_log(tree):
    assert (tree.run_dir / "logs" / "agent.log").read_text() == ""


def test_no_actor_and_no_zygote_has_a_descriptor_of_the_agents(tree):
    pid = tree.pid("mortal")
    agent = psutil.Process(pid).parent()

    def sockets(process):
        return {link for link in descriptors_of(process).values() if link.startswith("socket:")}

    assert sockets(agent.pid) & sockets(pid) == set()
    assert sockets(agent.pid) & sockets(zygote_of(tree).pid) == set()


HEAD = """
    import sys, time
    from pathlib import Path
    from dying_actors import Mortal
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec

    if __name__ == "__main__":
        spec = SupervisorSpec(id="root", children=(ChildSpec(id="mortal", actor=Mortal),))
        with Supervisor(spec, run_dir=Path(sys.argv[1]), run_id=sys.argv[2]) as tree:
            stray = tree.ref("mortal", Mortal).ask(Mortal.start_detached).result()
            print(tree.pid("mortal"), stray, flush=True)
            time.sleep(600)
"""


@pytest.fixture
def own_runs(monkeypatch):
    """Have the runs of this test apart from others: who starts one clears away the dead ones beside it."""
    with tempfile.TemporaryDirectory() as folder:  # shorter than pytest's, as sockets need it
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.mark.usefixtures("own_runs")
def test_the_next_start_clears_away_what_a_run_left_that_was_killed_as_a_whole(tmp_path):
    """Head, keeper and agent die at one moment: nobody is left who would sweep."""
    script, run_id = tmp_path / "head.py", f"dead{os.getpid()}"
    script.write_text(textwrap.dedent(HEAD))
    env = {**os.environ, "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(script), str(tmp_path / "first"), run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as head:
        pid, stray = map(int, head.stdout.readline().split())
        agent = psutil.Process(pid).parent()
        groups = cgroup.root(run_id, agent.pid)
        everybody = [psutil.Process(head.pid), agent.parent(), agent]
        for process in everybody:
            process.suspend()
        for process in everybody:
            process.kill()
    eventually(lambda: is_gone(pid))
    assert run_id in other_runs(SHM_ROOT)
    with Supervisor(SupervisorSpec(id="root"), run_dir=tmp_path / "second"):
        assert run_id not in other_runs(SHM_ROOT)
        eventually(lambda: is_gone(stray))
        assert groups is None or list(groups.parent.glob(f"relax-actor-{run_id}-*")) == []
