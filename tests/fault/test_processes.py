"""Deaths of actors, agents and what they started: who learns of them, when, and that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from dying_actors import Fleeting, Mortal
from watching import QUICK, descriptors_of, ended_after, events_of, eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.actor.page import PageView
from relax_actor.errors import ActorDied, Executed, StartFailed
from relax_actor.node import cgroup
from relax_actor.node.lease import LeaseTerms
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace

pytestmark = pytest.mark.fault

SUPPORT = str(Path(__file__).parents[1] / "support")


def spec_of(*children):
    return SupervisorSpec(id="root", backoff=QUICK, children=children)


@pytest.fixture
def tree(tmp_path):
    with Supervisor(spec_of(ChildSpec(id="mortal", actor=Mortal)), run_dir=tmp_path) as tree:
        yield tree


@pytest.fixture
def mortal(tree):
    return tree.ref("mortal", Mortal)


def is_gone(pid):
    """Whether there is no such process, or nothing but its exit status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def seen(tree, incarnation=1):
    return PageView.read(ShmSpace(tree.run_id), "mortal", incarnation)


def running(tree, mortal, method=Mortal.hang):
    """Call a method that never returns, and wait until it runs."""
    reply = mortal.ask(method)
    eventually(lambda: seen(tree).method == method.__name__)
    return reply


def group_of(tree):
    """Return the folder of the tree's control groups."""
    return cgroup.root(tree.run_id, psutil.Process(tree.pid("mortal")).ppid())


# -- who learns of a death, and when ----------------------------------------------------------------


def test_a_call_fails_while_the_dead_process_is_still_being_torn_down(tree, mortal):
    """The mutex tells; the pidfd comes only when half a gigabyte has been given back."""
    mortal.ask(Mortal.touch, 512 << 20, timeout_s=100).result()
    reply = running(tree, mortal)
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    with pytest.raises(ActorDied) as caught:
        reply.result(20)
    assert caught.value.reason == "SIGKILL"
    eventually(lambda: events_of(tree, "child_exited"))
    (dying,), exited = events_of(tree, "child_dying"), events_of(tree, "child_exited")[0]
    assert dying["m"] < exited["m"]


def test_a_call_that_ran_may_have_done_its_work(tree, mortal):
    reply = running(tree, mortal)
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    with pytest.raises(ActorDied) as caught:
        reply.result(20)
    assert caught.value.executed is Executed.MAYBE


def test_an_asynchronous_call_that_ran_may_have_done_its_work(tree, mortal):
    reply = running(tree, mortal, Mortal.hang_softly)
    assert mortal.ask(Mortal.one).result() == 1
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    with pytest.raises(ActorDied) as caught:
        reply.result(20)
    assert caught.value.executed is Executed.MAYBE


def test_a_call_that_still_waited_did_not_run(tree, mortal):
    running(tree, mortal)
    waiting = mortal.ask(Mortal.one)
    eventually(lambda: seen(tree).mailbox_messages == 1)
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    with pytest.raises(ActorDied) as caught:
        waiting.result(20)
    assert caught.value.executed is Executed.NO


def test_a_call_whose_answer_was_lost_is_known_to_have_run(tree, mortal):
    first = mortal.pin()  # else a slow second call goes to the next incarnation
    lost, queued = first.ask(Mortal.die_of_the_answer), first.ask(Mortal.one)
    for reply, executed in ((lost, Executed.DONE), (queued, Executed.NO)):
        with pytest.raises(ActorDied) as caught:
            reply.result(20)
        assert caught.value.executed is executed


def test_an_actor_that_ends_in_order_has_given_its_answers_before(tree, mortal):
    """Also those that its network thread had no time yet to send."""
    first = mortal.pin()
    replies = [first.ask(Mortal.answer, 500_000, last=number == 99) for number in range(100)]
    assert [len(reply.result()) for reply in replies] == [500_000] * 100


def test_a_fork_that_ends_in_user_code_is_not_the_actors_death(tree, mortal):
    assert mortal.ask(Mortal.fork_and_exit).result() == 3
    pid, incarnation = mortal.ask(Mortal.where).result()
    assert (pid, incarnation) == (tree.pid("mortal"), 1)
    assert events_of(tree, "child_dying") == []


def test_a_fork_that_lives_on_keeps_no_death_secret(tree, mortal):
    """A fork owns neither the mutex nor the socket, and it dies with its actor."""
    fork = mortal.ask(Mortal.fork_and_live).result()
    assert {mortal.ask(Mortal.where).result()[0] for _ in range(50)} == {tree.pid("mortal")}
    reply = running(tree, mortal)
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    with pytest.raises(ActorDied):
        reply.result(20)
    eventually(lambda: is_gone(fork))


def test_an_actor_may_read_its_data_through_forks(tree, mortal):
    assert mortal.ask(Mortal.load_in_forks, 6).result() == [0, 1, 2, 3, 4, 5]
    assert mortal.ask(Mortal.where).result() == (tree.pid("mortal"), 1)
    assert events_of(tree, "child_dying") == []


def test_an_actor_started_from_a_thread_that_ended_lives_on(tree):
    adding = threading.Thread(target=tree.add_child, args=("root", ChildSpec(id="second", actor=Mortal)))
    adding.start()
    adding.join()
    second = tree.ref("second", Mortal)
    assert second.ask(Mortal.where).result()[1] == 1
    assert second.ask(Mortal.where).result()[0] == tree.pid("second")


def test_what_an_actor_was_doing_outlives_it(tree, mortal):
    reply = running(tree, mortal)
    eventually(lambda: seen(tree).progress)  # which the method says only after it has begun
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    with pytest.raises(ActorDied):
        reply.result(20)
    eventually(lambda: events_of(tree, "child_exited"))
    page = json.loads((tree.run_dir / "crash" / "mortal-1.json").read_text())
    assert (page["method"], page["state"]) == ("hang", "READY")
    assert page["progress"] == "hanging on purpose"
    assert seen(tree) is None


def test_an_actor_that_ends_in_order_leaves_no_crash_report(tmp_path):
    with Supervisor(spec_of(ChildSpec(id="mortal", actor=Mortal)), run_dir=tmp_path):
        pass
    assert list((tmp_path / "crash").iterdir()) == []


@pytest.mark.parametrize("python", ["", sys.executable], ids=["zygote", "exec"])
def test_who_cannot_write_goes_on_and_when_it_fails_has_failed(tmp_path, python):
    """A full disk stops nobody who prints, and makes no failure look like a normal end."""
    child = ChildSpec(id="mortal", actor=Mortal, python=python)
    with Supervisor(spec_of(child), run_dir=tmp_path) as tree:
        mortal = tree.ref("mortal", Mortal)
        mortal.ask(Mortal.write_nowhere, "lost\n" * 10_000).result(20)
        assert mortal.ask(Mortal.where).result(20)[1] == 1
        mortal.ask(Mortal.fail_when_asked_no_more).result(20)
        eventually(lambda: events_of(tree, "child_exited"))
        assert events_of(tree, "child_exited")[0]["reason"].startswith("exit code 1")
        assert mortal.ask(Mortal.where).result(20)[1] == 2


# -- what dies with it ------------------------------------------------------------------------------


@pytest.fixture(params=["on", "off"])
def cgroups(request, monkeypatch):
    """Run with control groups, where they can be had, and without."""
    monkeypatch.setenv(cgroup.VARIABLE, request.param)


@pytest.mark.parametrize("start", [Mortal.start_detached, Mortal.fork_detached])
def test_a_descendant_in_a_session_of_its_own_dies_with_its_actor(cgroups, tree, mortal, start):
    stray = mortal.ask(start).result()
    eventually(lambda: os.getsid(stray) == stray)
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    assert mortal.ask(Mortal.where).result(20)[1] == 2
    assert is_gone(stray)


def test_a_stray_of_another_actor_is_left_alone(cgroups, tree, mortal):
    tree.add_child("root", ChildSpec(id="second", actor=Mortal))
    stray = tree.ref("second", Mortal).ask(Mortal.start_detached).result()
    os.kill(tree.pid("mortal"), signal.SIGKILL)
    assert mortal.ask(Mortal.where).result(20)[1] == 2
    assert not is_gone(stray)


def test_a_descendant_in_a_session_of_its_own_dies_with_the_agent_too(cgroups, tree, mortal):
    stray = mortal.ask(Mortal.start_detached).result()
    pid = tree.pid("mortal")
    psutil.Process(pid).parent().kill()
    eventually(lambda: is_gone(pid) and is_gone(stray))
    assert mortal.ask(Mortal.where).result(20)[1] == 2


def test_an_actor_that_holds_the_interpreter_lock_dies_with_its_agent(tree, mortal):
    running(tree, mortal, Mortal.hold_the_interpreter_lock)
    pid = tree.pid("mortal")
    agent = psutil.Process(pid).parent()
    zygote = next(child for child in agent.children() if child.pid != pid)
    agent.kill()
    eventually(lambda: is_gone(pid) and is_gone(zygote.pid))


PIPED = """
    import os, sys, time
    from relax_actor.node.process import die_with_pipe

    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writer)
        die_with_pipe(reader)
        print("armed", os.getpid(), flush=True)
        if os.fork() == 0:  # a fork in user code inherits whatever its parent has
            time.sleep(600)
        time.sleep(600)
    time.sleep(600)
"""


def test_the_death_pipe_breaks_with_its_one_writer_whoever_else_was_forked():
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PIPED)], stdout=subprocess.PIPE)
    with ended_after(parent):
        child = int(parent.stdout.readline().split()[1])
        family = eventually(lambda: psutil.Process(child).children())  # the fork comes after the word
        parent.kill()
        eventually(lambda: is_gone(child))
        for each in family:
            each.kill()


LATE = """
    import os
    from relax_actor.node.process import die_with_pipe

    reader, writer = os.pipe()
    os.close(writer)
    die_with_pipe(reader)
    print("alive")
"""


def test_whoever_comes_after_the_death_of_the_agent_dies_at_once():
    late = subprocess.run([sys.executable, "-c", textwrap.dedent(LATE)], stdout=subprocess.PIPE, check=False)
    assert (late.returncode, late.stdout) == (-signal.SIGKILL, b"")


def test_the_write_end_of_the_death_pipe_is_the_agents_alone(tree, mortal):
    agent = psutil.Process(tree.pid("mortal")).parent()
    writers = {}
    for process in (agent, *agent.children(recursive=True)):
        for fd, target in descriptors_of(process.pid).items():
            if target.startswith("pipe:") and is_written_to(process.pid, fd):
                writers.setdefault(target, set()).add(process.pid)
    assert {agent.pid} in writers.values()
    read_by_actor = set(descriptors_of(tree.pid("mortal")).values())
    assert all(pids == {agent.pid} for pipe, pids in writers.items() if pipe in read_by_actor)


def is_written_to(pid, fd):
    """Whether a descriptor is open for writing alone; one that was closed meanwhile is not."""
    try:
        flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()[1].split()[1]
    except FileNotFoundError:
        return False
    return int(flags, 8) & os.O_ACCMODE == os.O_WRONLY


@pytest.mark.skipif(
    cgroup.root("probe", 1) is None, reason="this user may not make control groups of version 2 here"
)
def test_an_actor_has_a_control_group_that_goes_with_it(tree, mortal):
    pid = tree.pid("mortal")
    group = group_of(tree) / "mortal.1"
    assert str(pid) in (group / "cgroup.procs").read_text().split()
    os.kill(pid, signal.SIGKILL)
    assert mortal.ask(Mortal.where).result(20)[1] == 2
    assert not group.exists()
    assert (group_of(tree) / "mortal.2").exists()


@pytest.mark.skipif(
    cgroup.root("probe", 1) is None, reason="this user may not make control groups of version 2 here"
)
def test_a_run_leaves_no_control_group_though_its_agent_died(tmp_path):
    with Supervisor(spec_of(ChildSpec(id="mortal", actor=Mortal)), run_dir=tmp_path) as tree:
        folder = group_of(tree)
        pid = tree.pid("mortal")
        psutil.Process(pid).parent().kill()
        eventually(lambda: is_gone(pid))
        assert tree.ref("mortal", Mortal).ask(Mortal.where).result(20)[1] == 2
        assert group_of(tree).exists()
    assert list(folder.parent.glob(f"relax-actor-{tree.run_id}-*")) == []


# -- forced ends ------------------------------------------------------------------------------------


def test_an_actor_that_is_killed_leaves_its_stacks_in_its_log(tmp_path):
    child = ChildSpec(id="mortal", actor=Mortal, shutdown_s=0.2)
    with Supervisor(spec_of(child), run_dir=tmp_path) as tree:
        running(tree, tree.ref("mortal", Mortal), Mortal.hold_the_interpreter_lock)
    log = (tmp_path / "logs" / "mortal-1.log").read_text()
    assert "most recent call first" in log
    assert "in hold_the_interpreter_lock" in log


def test_a_stopped_actor_is_killed_all_the_same(tmp_path):
    child = ChildSpec(id="mortal", actor=Mortal, shutdown_s=0.2)
    with Supervisor(spec_of(child), run_dir=tmp_path) as tree:
        pid = tree.pid("mortal")
        os.kill(pid, signal.SIGSTOP)
    assert is_gone(pid)


def test_an_actor_that_is_not_ready_in_time_says_where_it_was(tmp_path):
    slow = ChildSpec(id="mortal", actor=Mortal, args={"start_s": 600.0}, start_timeout_s=2.0)
    tree = Supervisor(spec_of(slow), run_dir=tmp_path).start()
    logs = tmp_path / "logs"
    try:
        eventually(lambda: any("in __init__" in log.read_text() for log in logs.glob("mortal-*.log")))
    finally:
        tree.kill()
        tree.close()


# -- other ways to start ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"zygote": ""}, {"python": sys.executable}])
def test_an_interpreter_of_its_own_has_the_same_rights_and_duties(tmp_path, how):
    child = ChildSpec(id="mortal", actor=Mortal, env={"COLOUR": "blue"}, **how)
    with Supervisor(spec_of(child), run_dir=tmp_path) as tree:
        mortal = tree.ref("mortal", Mortal)
        pid, _ = mortal.ask(Mortal.where).result()
        assert mortal.ask(Mortal.environment, "COLOUR").result() == "blue"
        assert "relax_actor.node.exec" in psutil.Process(pid).cmdline()
        assert os.getpgid(pid) == pid
        stray = mortal.ask(Mortal.start_detached).result()
        os.kill(pid, signal.SIGKILL)
        assert mortal.ask(Mortal.where).result(20)[1] == 2
        assert is_gone(stray)
        again = tree.pid("mortal")
        psutil.Process(again).parent().kill()
        eventually(lambda: is_gone(again))


def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    child = ChildSpec(id="mortal", actor=Mortal, python="/nowhere/python")
    with pytest.raises(StartFailed, match="/nowhere/python: No such file"):
        Supervisor(spec_of(child), run_dir=tmp_path).__enter__()


def test_a_zygote_that_nobody_declared_is_named(tmp_path):
    child = ChildSpec(id="mortal", actor=Mortal, zygote="nobodys")
    with pytest.raises(StartFailed, match="there is no zygote 'nobodys'"):
        Supervisor(spec_of(child), run_dir=tmp_path).__enter__()


def unfit(tmp_path, monkeypatch, code):
    """Return a tree whose zygote imports a module that leaves it unfit to fork."""
    (tmp_path / "unfitting.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    child = ChildSpec(id="mortal", actor=Mortal)
    return Supervisor(spec_of(child), run_dir=tmp_path, zygotes={"default": ["unfitting"]})


TOUCHES_A_DEVICE = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
"""
STARTS_A_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, name="pool of theirs", daemon=True).start()
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [(TOUCHES_A_DEVICE, "torch.cuda is initialized"), (STARTS_A_THREAD, "a fork would lose: pool of theirs")],
    ids=["device", "thread"],
)
def test_actors_of_a_zygote_that_must_not_fork_start_in_interpreters_of_their_own(
    tmp_path, monkeypatch, code, reason
):
    """A fork of a CUDA context is a broken one, and one of threads may hang: it must never come to that."""
    with unfit(tmp_path, monkeypatch, code) as tree:
        mortal = tree.ref("mortal", Mortal).within(60)
        assert mortal.ask(Mortal.one).result() == 1
        agent = psutil.Process(tree.pid("mortal")).parent()
        assert "relax_actor.node.exec" in psutil.Process(tree.pid("mortal")).cmdline()
        eventually(lambda: [each.pid for each in agent.children()] == [tree.pid("mortal")])
        os.kill(tree.pid("mortal"), signal.SIGKILL)
        assert mortal.ask(Mortal.where).result()[1] == 2
    events, _ = read_events(tmp_path / "events.jsonl")
    warnings = [event for event in events if event["kind"] == "zygote_unfit"]
    assert [(event["zygote"], reason in event["reason"]) for event in warnings] == [("default", True)]
    assert "importing unfitting" in (tmp_path / "logs" / "agent.log").read_text()


# -- memory -----------------------------------------------------------------------------------------


def test_an_actor_says_how_soon_it_may_be_taken_for_want_of_memory(tmp_path):
    child = ChildSpec(id="mortal", actor=Mortal, oom_score_adj=321)
    with Supervisor(spec_of(child), run_dir=tmp_path) as tree:
        text = tree.ref("mortal", Mortal).ask(Mortal.read_file, "/proc/self/oom_score_adj").result()
    assert text.strip() == "321"


HUNGRY = """
    import os, sys
    from pathlib import Path
    from dying_actors import Mortal
    from relax_actor import ChildSpec, RestartType, Supervisor, SupervisorSpec

    if __name__ == "__main__":
        Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
        child = ChildSpec(id="mortal", actor=Mortal, oom_score_adj=1000, restart=RestartType.TEMPORARY)
        with Supervisor(SupervisorSpec(id="root", children=(child,)), run_dir=Path(sys.argv[2])) as tree:
            try:
                tree.ref("mortal", Mortal).ask(Mortal.eat_memory).result()
            except Exception as error:
                print(error)
"""


@pytest.fixture
def small_group():
    """A control group of 400 MiB, version 2 or 1, whichever counts memory here."""
    for base, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = Path(base) / f"relax-actor-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            (folder / limit).write_text(str(400 << 20))
            yield folder
            members = folder / "cgroup.procs"
            eventually(lambda members=members: not members.read_text())
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("this user may not make control groups that limit memory here")


def killed_in(group):
    """Return how many processes the kernel has taken in a control group for want of memory."""
    counters = (group / "memory.events", group / "memory.oom_control")
    text = next(path for path in counters if path.exists()).read_text()
    return int(text.split("oom_kill ")[1].split()[0])


def test_a_death_for_want_of_memory_is_told_with_its_evidence(tmp_path, small_group):
    script = tmp_path / "hungry.py"
    script.write_text(textwrap.dedent(HUNGRY))
    env = {**os.environ, "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}"}
    for attempt in range(20):
        run_dir, before = tmp_path / f"run-{attempt}", killed_in(small_group)
        command = [sys.executable, str(script), str(small_group), str(run_dir)]
        head = subprocess.run(command, env=env, timeout=100, check=False)
        # while the memory of the first victim is still being given back, the kernel may take a second one
        if killed_in(small_group) == before + 1:
            break
    assert head.returncode == 0
    events, _ = read_events(run_dir / "events.jsonl")
    (exited,) = [event for event in events if event["kind"] == "child_exited"]
    assert exited["reason"].startswith("out of memory: ")
    assert "oom_kill +1" in exited["reason"]


# -- devices ----------------------------------------------------------------------------------------

FAKE_NVML = """
    import types
    from pathlib import Path

    HELD = Path({held!r})

    class NVMLError(Exception):
        pass

    def nvmlInit():
        pass

    def nvmlDeviceGetHandleByIndex(index):
        return index

    def nvmlDeviceGetComputeRunningProcesses(handle):
        if handle != 5 or not HELD.exists():
            return []
        return [types.SimpleNamespace(pid=int(HELD.read_text()), usedGpuMemory=812 << 20)]

    def nvmlDeviceGetGraphicsRunningProcesses(handle):
        return []
"""


def test_an_actor_is_not_restarted_before_its_device_is_free(tmp_path, monkeypatch):
    held = tmp_path / "held"
    (tmp_path / "pynvml.py").write_text(textwrap.dedent(FAKE_NVML.format(held=str(held))))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    child = ChildSpec(id="mortal", actor=Mortal, devices=("cuda:5",))
    with Supervisor(spec_of(child), run_dir=tmp_path) as tree:
        pid = tree.pid("mortal")
        held.write_text(str(pid))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: events_of(tree, "child_dying"))
        eventually(lambda: is_gone(pid))
        time.sleep(0.3)  # nothing must happen: there is no event to wait for
        assert events_of(tree, "child_exited") == []
        held.unlink()
        assert tree.ref("mortal", Mortal).ask(Mortal.where).result(20)[1] == 2


# -- births ------------------------------------------------------------------------------------------

DEAD_AT_BIRTH = """
    import os
    from relax_actor.node import process

    process.become_subreaper()
    (told, tell), (waited, let_go) = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(let_go)
        child = os.fork()
        if child == 0:
            os._exit(3)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.write(tell, child.to_bytes(4, "little"))
        os.read(waited, 1)
        os._exit(0)
    child = int.from_bytes(os.read(told, 4), "little")
    assert process.awaits_adoption(child)
    assert process.exit_of(child) is None
    os.close(let_go)
    os.waitpid(middle, 0)
    assert not process.awaits_adoption(child)
    assert process.exit_of(child) == (3, None)
    os.waitpid(child, 0)
    assert not process.awaits_adoption(child)
    assert process.exit_of(child) is None
"""


def test_who_dies_before_it_is_adopted_is_collected_when_it_is():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(DEAD_AT_BIRTH)], check=False, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("raises", [False, True])
def test_who_dies_before_the_head_hears_that_it_was_ready_is_restarted(tmp_path, raises):
    """It did start, so the tree goes on: a status page tells its agent what its own word did not."""
    child = ChildSpec(id="fleeting", actor=Fleeting, args={"raises": raises})
    with Supervisor(spec_of(child), run_dir=tmp_path) as tree:
        eventually(lambda: len(events_of(tree, "child_ready")) == 2)
    assert [event["incarnation"] for event in events_of(tree, "child_ready")] == [1, 2]
    (again,) = events_of(tree, "child_restarting")
    assert again["reason"] == ("exit code 1: RuntimeError: too short a life" if raises else "SIGKILL")


# -- zygotes ----------------------------------------------------------------------------------------

SLOW = """
    import time
    from pathlib import Path

    started = Path(__file__).with_name("started")
    if started.exists():
        time.sleep(8.0)
    started.touch()
"""


def test_a_zygote_that_imports_for_longer_than_the_lease_keeps_nobody_else_waiting(tmp_path, monkeypatch):
    """The agent goes on meanwhile, so that its other actors live, and who waits may still be killed."""
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    lease = LeaseTerms(ttl_s=5.0, renew_s=0.5)
    zygotes = {"default": (), "slow": ("slow",)}
    children = [ChildSpec(id=name, actor=Mortal, zygote="slow") for name in ("mortal", "waiting")]
    other = ChildSpec(id="other", actor=Mortal)
    with Supervisor(spec_of(*children, other), run_dir=tmp_path, lease=lease, zygotes=zygotes) as tree:
        agent = psutil.Process(tree.pid("mortal")).parent()
        actors = {tree.pid(name) for name in ("mortal", "waiting", "other")}
        for process in agent.children():
            if process.pid not in actors:
                process.kill()
        for name in ("mortal", "waiting"):
            os.kill(tree.pid(name), signal.SIGKILL)
        eventually(lambda: len(events_of(tree, "child_restarting")) == 2)
        tree.remove_child("waiting")
        assert tree.ref("mortal", Mortal).within(30).ask(Mortal.where).result()[1] == 2
        assert tree.ref("other", Mortal).ask(Mortal.where).result()[1] == 1
        eventually(lambda: tree.pid("waiting") is None)
    assert not events_of(tree, "host_lost")
