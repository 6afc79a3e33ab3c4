"""Eighteen traps that others fell into, and the test that fails when we do.

 1. An actor started from a thread that ends dies with it: PR_SET_PDEATHSIG is bound to threads.
    processes: test_an_actor_started_from_a_thread_that_ended_lives_on
 2. A fork that inherits the write end of a pipe keeps its reader alive.
    traps: test_a_fork_of_the_head_that_outlives_it_keeps_nothing_alive
    processes: test_the_write_end_of_the_death_pipe_is_the_agents_alone
    processes: test_the_death_pipe_breaks_with_its_one_writer_whoever_else_was_forked
 3. The death of an actor with much memory is told when the memory has been given back.
    processes: test_a_call_fails_while_the_dead_process_is_still_being_torn_down
 4. Who holds the interpreter lock is taken for dead, cannot be looked at, or outlives its parent.
    supervision_features: test_who_holds_the_gil_is_neither_suspected_nor_unkillable
    hosts: test_whoever_cannot_look_at_the_lease_for_long_is_not_ended_for_it
    processes: test_an_actor_that_is_killed_leaves_its_stacks_in_its_log
    processes: test_an_actor_that_holds_the_interpreter_lock_dies_with_its_agent
 5. A grandchild in a session of its own outlives its actor.
    processes: test_a_descendant_in_a_session_of_its_own_dies_with_its_actor
 6. A call to a stopped actor costs more than its deadline.
    calls: test_no_call_ends_before_its_deadline
    calls: test_a_sender_without_credit_waits_within_its_deadline
 7. An exception that is huge, recursive, or cannot be sent or imported, kills the actor or says nothing.
    calls: test_no_exception_is_too_strange_to_be_told
 8. A constructor that raises is tried for ever.
    supervisor: test_a_constructor_that_raises_is_tried_again_once_and_named
 9. An old incarnation goes on beside its successor and is heard.
    hosts: test_an_old_incarnation_that_goes_on_beside_its_successor_is_heard_by_nobody
    hosts: test_an_agent_that_was_given_up_is_refused_when_it_comes_back
10. One rank that dies in a collective blocks the others, or costs them their memory.
    gang: test_a_rank_killed_inside_an_all_reduce_costs_one_process
11. A long TMPDIR, since AF_UNIX paths have 107 bytes.
    traps: test_a_long_tmpdir_is_no_obstacle
12. The end of one run ends another of the same user.
    traps: test_the_end_of_one_tree_is_not_the_end_of_another
    loop: test_two_runs_on_one_host_do_not_disturb_one_another
13. A busy host is taken for a dead one.
    traps: test_a_host_that_is_far_too_busy_is_not_taken_for_dead
14. Ctrl-C, once or twice, in a blocked call, leaves something behind or takes long.
    supervision_features: test_ctrl_c_in_a_blocked_call_ends_the_tree_in_bounded_time
15. Senders to the full mailbox of a dead actor wait for ever.
    calls: test_a_full_mailbox_of_a_dead_actor_holds_nobody
16. A head that is killed leaves processes or segments.
    supervisor: test_a_killed_head_leaves_no_process_and_no_segment
    hosts: test_a_killed_head_leaves_nothing_on_any_host
17. A restarted rollout is ready, and nobody sees that it does not serve.
    loop_kills: test_the_only_rollout_may_die_while_it_installs_and_while_it_samples
18. A fork in user code owns the mutex, answers the socket, or its end is taken for its actor's.
    processes: test_a_fork_that_lives_on_keeps_no_death_secret
    processes: test_a_fork_that_ends_in_user_code_is_not_the_actors_death
    processes: test_an_actor_may_read_its_data_through_forks
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from sample_actors import Counter
from watching import eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.telemetry import read_events

pytestmark = pytest.mark.fault

LOAD_S = float(os.environ.get("RELAX_ACTOR_LOAD_S", "8"))
"""How long the load lasts; 60 for a run by hand."""

BUSY = "import time\nuntil = time.monotonic() + {seconds}\nwhile time.monotonic() < until: pass"


TESTS = Path(__file__).parents[1]


def test_every_trap_has_a_test():
    traps = re.findall(r"^ ?(\d+)\. ", __doc__, re.MULTILINE)
    assert traps == [str(number) for number in range(1, 19)]
    for section in re.split(r"^ ?\d+\. ", __doc__, flags=re.MULTILINE)[1:]:
        named = re.findall(r"^    (\w+): (test_\w+)$", section, re.MULTILINE)
        assert named
        for file, test in named:
            (path,) = TESTS.glob(f"*/test_{file}.py")
            assert f"\ndef {test}(" in path.read_text()


def spec_of(replicas=2):
    return SupervisorSpec(id="root", children=(ChildSpec(id="counter", actor=Counter, replicas=replicas),))


EMBEDDING = """
    import json
    from sample_actors import Counter
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec

    if __name__ == "__main__":
        child = ChildSpec(id="counter", actor=Counter)
        with Supervisor(SupervisorSpec(id="root", children=(child,))) as tree:
            print(json.dumps(tree.ref("counter", Counter).ask(Counter.add, 4).result()))
"""


def test_a_long_tmpdir_is_no_obstacle(tmp_path):
    """AF_UNIX paths have 107 bytes, and Slurm's TMPDIR alone may have more."""
    (tmp_path / "embed.py").write_text(textwrap.dedent(EMBEDDING))
    long = Path(tempfile.gettempdir()) / ("x" * 120)
    long.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "embed.py")],
            env={
                **os.environ,
                "TMPDIR": str(long),
                "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        subprocess.run(["rm", "-rf", str(long)], check=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 4


FORKING = """
    import json, os, time
    import psutil
    from sample_actors import Counter
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec

    if __name__ == "__main__":
        child = ChildSpec(id="counter", actor=Counter)
        with Supervisor(SupervisorSpec(id="root", children=(child,))) as tree:
            fork = os.fork()
            if fork == 0:
                time.sleep(600)
                os._exit(0)
            agent = psutil.Process(tree.pid("counter")).parent()
            family = [tree.pid("counter"), agent.pid, agent.parent().pid]
            print(json.dumps({"fork": fork, "family": family}), flush=True)
            time.sleep(600)
"""


def test_a_fork_of_the_head_that_outlives_it_keeps_nothing_alive(tmp_path):
    """It has inherited the write end of the agent's standard input, so that there is no end of file."""
    (tmp_path / "embed.py").write_text(textwrap.dedent(FORKING))
    path = os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, str(tmp_path / "embed.py")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as head:
        said = json.loads(head.stdout.readline())
        family = [psutil.Process(pid) for pid in said["family"]]
        try:
            head.kill()
            eventually(lambda: not any(process.is_running() for process in family))
            assert psutil.pid_exists(said["fork"])
        finally:
            os.kill(said["fork"], signal.SIGKILL)


def test_the_end_of_one_tree_is_not_the_end_of_another(tmp_path):
    """Two trees of one user on one host; one is stopped, one loses its node agent."""
    with Supervisor(spec_of(), run_dir=tmp_path / "a") as a:
        with Supervisor(spec_of(), run_dir=tmp_path / "b") as b:
            psutil.Process(b.pid("counter/0")).parent().kill()
            counter = b.ref("counter/0", Counter).within(30)
            eventually(lambda: counter.ask(Counter.where).result()[1] == 2)  # the first may answer once more
        assert a.ref("counter/0", Counter).ask(Counter.where).result()[1] == 1
        assert a.ref("counter/1", Counter).ask(Counter.add, 1).result() == 1


@pytest.mark.timeout(180)
def test_a_host_that_is_far_too_busy_is_not_taken_for_dead(tmp_path):
    """Sixteen busy processes: slow is not dead, and whoever is asked answers."""
    with Supervisor(spec_of(4), run_dir=tmp_path) as tree:
        load = [subprocess.Popen([sys.executable, "-c", BUSY.format(seconds=LOAD_S + 5)]) for _ in range(16)]
        try:
            refs = [tree.ref(f"counter/{replica}", Counter).within(60) for replica in range(4)]
            until, rounds = time.monotonic() + LOAD_S, 0
            while time.monotonic() < until:
                rounds += 1
                assert [ref.ask(Counter.add, 1).result() for ref in refs] == [rounds] * 4
        finally:
            for process in load:
                process.kill()
                process.wait()
        events, _ = read_events(tree.run_dir / "events.jsonl")
    deaths = {"child_dying", "child_exited", "child_restarting", "host_lost", "host_unreachable"}
    assert not [event for event in events if event["kind"] in deaths]
