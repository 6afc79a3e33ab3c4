"""What ps, tree, top, why, stack, events and dead-letters print, of logs and of this very process."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from launcher import eventview, stack, top, why
from launcher.columns import duration, size
from launcher.errors import RunFolderError
from launcher.eventview import Choice, dead_letters, events
from launcher.lives import Life
from launcher.pages import in_method_s, kept_page, read_page
from launcher.ps import CpuMeter, ps, rows, tree
from launcher.runfolder import RunFolder, start_ticks
from launcher.view import RunView
from relax_actor.actor import page as status_page
from relax_actor.actor.page import PageRecord, PageWriter
from relax_actor.node.facts import catches, look
from transport.shm import ShmSpace

HERE = os.uname().nodename
DUMPER = """
import faulthandler, signal, sys, time
log = open(sys.argv[1], "a")
faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
def busy_here():
    print("ready", flush=True)
    while True: pass
busy_here()
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(str(tmp_path / "run"), name="x")


@pytest.fixture
def view(folder, happened):
    """Write what has happened and look at it."""

    def look_at(*, host: str = HERE) -> RunView:
        happened.events[0] |= {"host": host, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
        folder.events.write_text("".join(json.dumps(event) + "\n" for event in happened.events))
        return RunView(folder)

    return look_at


@pytest.fixture
def alive(happened):
    """Let an actor be this process."""

    def start(name: str, **fields) -> None:
        happened.start(name, **{"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())} | fields)

    return start


def said(function, *args, **options) -> str:
    out = io.StringIO()
    function(args[0], out, *args[1:], **options)
    return out.getvalue()


def test_ps_shows_what_lives_what_ended_and_what_waits(view, happened, alive):
    alive("queue")
    happened.start("left")
    happened.end("left", "SIGKILL", "signal", signal=9)
    happened.start("right", pid=1, start_ticks=None)  # of an older log: nobody knows whose pid that is

    table = {row.actor: row for row in rows(view())}

    assert (table["queue"].state, table["queue"].pid, table["queue"].host) == ("ready", os.getpid(), HERE)
    assert table["queue"].rss_bytes > 2**20
    assert (table["left"].state, table["left"].pid, table["left"].last_exit) == ("exited", None, "SIGKILL")
    assert (table["right"].state, table["right"].pid) == ("gone", None)
    assert (table["rollout/0"].state, table["rollout/0"].incarnation) == ("waiting", 0)
    text = said(ps, view()).splitlines()
    assert text[0] == f"head: pid {os.getpid()}"
    assert text[2].split()[:4] == ["actor", "state", "inc", "pid"]
    assert "SIGKILL" in text[4]
    assert json.loads(said(ps, view(), as_json=True))[0]["actor"] == "queue"


def test_of_another_host_the_log_says_all_there_is(view, happened):
    happened.start("queue", host="elsewhere")
    seen = view(host="elsewhere")

    assert [row.state for row in rows(seen)][:2] == ["ready", "waiting"]
    assert seen.head_line == f"head: on elsewhere, out of sight from {HERE}"
    assert seen.is_running


def test_tree_draws_supervisors_and_actors(view, happened):
    happened.start("queue", "left", "right")
    happened.end("left", "SIGKILL", "signal", signal=9)
    happened.add("supervisor_ready", supervisor="pair")

    lines = said(tree, view()).splitlines()
    assert [line[:10].rstrip() for line in lines[1:5]] == ["run", "├─ queue", "├─ pair", "│  ├─ left"]
    assert lines[-1].startswith("   └─ rollout/1")
    assert lines[4].endswith("SIGKILL")
    nested = json.loads(said(tree, view(), as_json=True))
    assert (nested["supervisor"], nested["state"]) == ("run", "starting")
    assert nested["children"][1]["children"][0]["last_exit"] == "SIGKILL"


def test_tree_of_a_log_without_one_lists_the_actors(view, happened, folder):
    happened.add("tree_changed", tree=None)
    happened.start("queue")
    assert "└─ queue" in said(tree, view())


def test_top_shows_the_busiest_first_as_often_as_asked(view, happened, alive, monkeypatch):
    alive("queue")
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    text = said(top.top, view(), looks=2)
    assert text.count("queue") == 2
    assert "GiB used" in text

    happened.add("run_ended", exit_code=0, reason="done")
    happened.events[0]["pid"] = 0
    assert said(top.top, RunViewOf(view()), looks=None).count("queue") == 1


class RunViewOf:
    """A view of a run that is over."""

    def __init__(self, view) -> None:
        self._view = view
        self.is_running = False

    def __getattr__(self, name):
        return getattr(self._view, name)


def test_a_terminal_is_redrawn(view, alive, monkeypatch):
    alive("queue")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert said(lambda seen, _: top.top(seen, Terminal(), looks=1), view()) == ""


def test_cpu_is_measured_between_two_looks():
    meter = CpuMeter()
    facts = look(os.getpid(), start_ticks(os.getpid()))
    later = msgspec.structs.replace(facts, cpu_s=facts.cpu_s + 1.0, age_s=facts.age_s + 2.0)

    assert meter.frac(facts) == pytest.approx(facts.cpu_frac)
    assert meter.frac(later) == pytest.approx(0.5)
    assert meter.frac(later) == pytest.approx(later.cpu_frac)
    assert msgspec.structs.replace(facts, age_s=0.0).cpu_frac == 0.0


def test_a_pid_that_belongs_to_another_by_now_is_nobody():
    assert look(os.getpid(), 1) is None
    assert look(0, 1) is None
    assert look(2**22 + 1, 1) is None


def test_a_stopped_actor_and_its_way_on_are_told(view, happened, alive):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    try:
        alive("queue", pid=child.pid, start_ticks=start_ticks(child.pid))
        assert rows(view())[0].state == "stopped"
        assert f"hint: kill -CONT {child.pid}" in said(why.why, view(), "queue")
        with pytest.raises(RunFolderError, match="stopped by a signal"):
            stack.stack(view(), io.StringIO(), "queue")
    finally:
        child.kill()
        child.wait()


def test_why_tells_the_first_cause_first_then_what_followed(view, happened, folder):
    happened.start("left", "right")
    happened.end("right", "SIGKILL", "signal", signal=9, code=None)
    happened.add("child_restarting", child="right", incarnation=1, delay_s=0.1, also=["left"])
    happened.end("left", "stopped", "stopped", code=0)
    happened.add(
        "child_spawned", child="left", incarnation=2, pid=os.getpid(), start_ticks=start_ticks(os.getpid())
    )
    happened.add("child_ready", child="left", incarnation=2)

    text = said(why.why, view(), "left")

    assert text.splitlines()[0] == "right (incarnation 1, pid 70) died: SIGKILL"
    assert "what followed from it:" in text
    assert "then   started again as left#2, ready after 1.0 s" in text
    assert "exit   stopped, exit code 0" in text


def test_why_shows_log_crash_files_page_earlier_ends_and_a_hint(view, happened, folder, monkeypatch):
    for incarnation in (1, 2):
        log = folder.log_path("queue", incarnation)
        happened.start("queue", incarnation=incarnation, log=str(log))
        happened.end("queue", "exit code 1: ValueError: no", "error", incarnation, code=1)
    log.write_text("before\nThread 0x00007f (most recent call first):\nlast words\n")
    folder.crash_path("queue", 2, ".txt").write_text("Traceback\n")
    page = PageRecord(incarnation=2, method="put", call_id=812, method_since_s=0.0)
    folder.crash_path("queue", 2, ".json").write_bytes(msgspec.json.encode(page))
    monkeypatch.setattr("launcher.pages.time.monotonic", lambda: 20.0)
    monkeypatch.setattr(why.time, "time", lambda: happened.events[-1]["t"] + 5.0)

    text = said(why.why, view(), "queue")

    assert "in     put, call 812, for 15.0 s" in text
    assert "  before\n  last words\n" in text
    assert f"crash  {folder.crash_path('queue', 2, '.txt')}" in text
    assert "queue#1  exit code 1: ValueError: no" in text
    assert text.endswith(
        "hint: the last line of the traceback is what was raised; the lines above lead to it\n"
    )
    assert said(why.why, view(), "queue#1").startswith("queue (incarnation 1")
    assert json.loads(said(why.why, view(), "queue", as_json=True))["call_id"] == 812


def test_why_of_an_actor_that_runs_says_since_when(view, happened, alive):
    alive("queue")
    text = said(why.why, view(), "queue")
    assert text.startswith(f"queue (incarnation 1, pid {os.getpid()}) runs: ready since ")
    assert "hint: relax-actor stack" in text


def test_why_of_an_actor_that_is_gone_without_a_word_says_so(view, happened):
    happened.start("queue", pid=2**22 + 1, start_ticks=1)
    text = said(why.why, view(), "queue")
    assert "is gone, and the head has not said how (head: pid" in text
    happened.add("process_exited", child="queue", incarnation=1, code=3, signal=None)
    assert "died: exit code 3" in said(why.why, view(), "queue")


def test_why_of_an_actor_that_waits_for_its_next_start_says_for_how_long(view, happened):
    happened.start("queue")
    happened.end("queue", "SIGKILL", "signal", signal=9)
    assert "then   not started again (exited)" in said(why.why, view(), "queue")
    happened.add("child_restarting", child="queue", incarnation=1, delay_s=0.25, also=[])
    assert "then   to be started again 0.25 s after its end" in said(why.why, view(), "queue")


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("quue", "hint: did you mean queue?"),
        ("rollout", "hint: its replicas are rollout/0, rollout/1"),
        ("zzz", "hint: there are queue, left, right, rollout/0, rollout/1"),
        ("queue#9", "hint: there are queue#1"),
        ("left#1", "hint: there are none yet"),
        ("queue#x", "hint: queue#1 is its first start"),
        ("left", "hint: relax-actor tree"),
    ],
)
def test_an_actor_that_is_not_there_is_an_error_with_a_hint(view, happened, word, error):
    happened.start("queue")
    with pytest.raises(RunFolderError) as caught:
        why.why(view(), io.StringIO(), word)
    assert error in str(caught.value)


def test_a_run_without_a_tree_yet_has_no_actors(folder):
    folder.events.touch()
    seen = RunView(folder)
    assert seen.head_line == "head: it has not started a tree yet"
    assert seen.is_here
    with pytest.raises(RunFolderError, match="no actor has been started yet"):
        seen.actor("queue")


def test_the_head_line_says_how_a_run_ended(view, happened):
    seen = view()
    seen.lives.head_pid = 2**22 + 1
    assert seen.head_line == f"head: gone (it was pid {2**22 + 1})"
    happened.add("run_ended", exit_code=0, reason="done")
    seen = view()
    seen.lives.head_pid = 2**22 + 1
    assert (seen.head_line, seen.is_running) == ("ended with exit code 0: done", False)


def test_the_lock_says_whether_a_launch_runs(view, folder):
    with folder.locked("0011aabb"):
        assert view().is_running


def test_a_missing_event_log_is_an_empty_one(folder):
    assert RunView(folder).lives.names == []


@pytest.fixture
def dumper(tmp_path):
    """Start a process that dumps its stacks into a log."""
    log = tmp_path / "dumper.log"
    log.write_text("before\n")
    process = subprocess.Popen([sys.executable, "-c", DUMPER, str(log)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process, log
    process.kill()
    process.communicate()


def test_a_stack_is_what_the_process_dumped_now(view, alive, dumper):
    process, log = dumper
    alive("queue", pid=process.pid, start_ticks=start_ticks(process.pid), log=str(log))

    text = said(stack.stack, view(), "queue", timeout_s=60.0)

    assert text.startswith(f"queue#1 (pid {process.pid}), innermost call first")
    assert ", the main one\n" in text
    assert re.search(r'File "<string>", line [67] in busy_here', text)
    (thread,) = json.loads(said(stack.stack, view(), "queue#1", timeout_s=60.0, as_json=True))
    assert thread["frames"][0]["function"] == "busy_here"


def test_a_process_without_a_handler_is_not_signalled(view, alive, dumper, monkeypatch):
    process, log = dumper
    alive("queue", pid=process.pid, start_ticks=start_ticks(process.pid), log=str(log))
    monkeypatch.setattr(stack, "catches", lambda *_: False)
    with pytest.raises(RunFolderError, match="no handler for SIGUSR1, which would kill it"):
        stack.stack(view(), io.StringIO(), "queue")
    assert process.poll() is None


def test_a_dump_that_does_not_come_is_an_error(view, alive, dumper, tmp_path):
    process, _ = dumper
    (tmp_path / "other.log").touch()
    alive("queue", pid=process.pid, start_ticks=start_ticks(process.pid), log=str(tmp_path / "other.log"))
    with pytest.raises(RunFolderError, match=r"did not dump its stacks within 0\.1 s"):
        stack.stack(view(), io.StringIO(), "queue", timeout_s=0.1)


def test_there_is_no_stack_of_what_does_not_run(view, happened):
    happened.start("queue")
    happened.end("queue", "SIGKILL", "signal", signal=9)
    with pytest.raises(RunFolderError, match="`queue` does not run\n"):
        stack.stack(view(), io.StringIO(), "queue")
    with pytest.raises(RunFolderError, match=f"does not run on {HERE}"):
        stack.stack(view(host="elsewhere"), io.StringIO(), "left")


@pytest.mark.parametrize(
    ("script", "result"),
    [("echo native $4 $5", "native 0"), ("echo no right >&2; exit 3", "py-spy failed: no right")],
)
def test_native_stacks_are_those_of_py_spy(view, alive, tmp_path, monkeypatch, script, result):  # noqa: PLR0917 - fixtures
    alive("queue")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunFolderError, match="`py-spy` is not installed"):
        stack.native_stack(view(), io.StringIO(), "queue")
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    if "exit" in script:
        with pytest.raises(RunFolderError, match=result):
            stack.native_stack(view(), io.StringIO(), "queue")
    else:
        assert said(stack.native_stack, view(), "queue") == f"native {os.getpid()}\n"


def test_a_signal_with_a_handler_is_known():
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not catches(os.getpid(), signal.SIGUSR2)
    assert not catches(2**22 + 1, signal.SIGUSR1)


def test_events_are_chosen_by_kind_and_actor(view, happened):
    happened.start("queue", "left")
    happened.end("left", "SIGKILL, or so", "signal", signal=9)
    happened.add("step", step=1, note="")

    lines = said(events, view(), Choice(actor="left")).splitlines()
    assert [line.split()[1] for line in lines] == ["child_spawned", "child_ready", "child_exited"]
    assert 'left#1           reason="SIGKILL, or so"  exit=signal' in lines[-1]
    assert (
        said(events, view(), Choice(kinds=("step",)))
        .rstrip()
        .endswith('step               head#1           step=1  note=""')
    )
    assert len(said(events, view(), Choice(), last=2).splitlines()) == 2
    assert said(events, view(), Choice(), last=0) == ""
    assert json.loads(said(events, view(), Choice(kinds=("step",)), as_json=True))["step"] == 1


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        (Choice(kinds=("child_exit",)), "hint: did you mean child_ready?"),
        (Choice(kinds=("zzz",)), "hint: there are child_ready, child_spawned, tree_started"),
        (Choice(kinds=("child_ready",), actor="left"), "has no such event of `left`"),
    ],
)
def test_events_that_never_happened_are_an_error(view, happened, choice, error):
    happened.start("queue")
    with pytest.raises(RunFolderError) as caught:
        events(view(), io.StringIO(), choice)
    assert error in str(caught.value)


def test_events_are_followed_until_the_run_ends(view, happened, folder, monkeypatch):
    seen = view()
    more = ['{"t": 1, "kind": "step", "step": 2, "actor": "t", "inc": 1}\n', ""]

    def write_more(_) -> None:
        with folder.events.open("a") as file:
            file.write(more.pop(0))

    monkeypatch.setattr(eventview.time, "sleep", write_more)
    monkeypatch.setattr(type(seen), "is_running", property(lambda _: bool(more)))
    text = said(events, seen, Choice(kinds=("step",)), follow=True)
    assert text.count("step=2") == 1


def test_dead_letters_say_whom_they_were_for_and_why(view, happened):
    assert said(dead_letters, view()) == "no dead letters\n"
    happened.add(
        "dead_letter", actor="queue", method="put", sender="left", reason="Traceback\nValueError: no"
    )
    happened.add("dead_letter", actor="queue", method="get", sender="left", reason="")
    first, second = said(dead_letters, view()).splitlines()[1:]
    assert first.split()[1:] == ["queue#1", "put", "left", "ValueError:", "no"]
    assert second.split()[1:] == ["queue#1", "get", "left", "-"]
    assert len(json.loads(said(dead_letters, view(), as_json=True))) == 2


def test_a_kept_page_is_read_or_is_not_there(tmp_path):
    assert kept_page(tmp_path / "x.json") is None
    (tmp_path / "x.json").write_text("{")
    assert kept_page(tmp_path / "x.json") is None
    assert in_method_s(PageRecord(incarnation=1)) is None


def test_ps_and_why_read_the_status_page_of_an_actor_that_runs(view, happened, alive, tmp_path, monkeypatch):
    happened.events[0]["shm_root"] = str(tmp_path)
    alive("queue")
    space = ShmSpace("0011aabb", tmp_path)
    with status_page.create(space, "queue", 1):
        page = PageWriter(space, "queue", 1)
        page.begin("trainer", 1, 812, "put")
        page.progress("row 3 of 9")
        page.tick(5, 0)
        now_s = time.monotonic()
        monkeypatch.setattr("launcher.pages.time.monotonic", lambda: now_s)

        row = rows(view())[0]

        assert (row.method, row.mailbox, row.progress) == ("put", 5, "row 3 of 9")
        assert row.method_s >= 0.0
        assert "row 3 of 9" in said(ps, view())
        since_s = read_page("0011aabb", str(tmp_path), "queue", 1).method_since_s
        assert f"in     put, call 812, for {duration(now_s - since_s)}" in said(why.why, view(), "queue")
    assert read_page("", "", "queue", 1) is None


def test_sizes_and_times_are_said_as_people_do():
    assert [size(n) for n in (5, 2048, 3 * 2**20, 1.5 * 2**30)] == ["5 B", "2 KiB", "3 MiB", "1.5 GiB"]
    said_times = [duration(s) for s in (0.25, 14.2, 185, 8040)]
    assert said_times == ["0.25 s", "14.2 s", "3 min 5 s", "2 h 14 min"]


def test_a_life_is_named_by_its_incarnation():
    assert str(Life(name="rollout/3", incarnation=2)) == "rollout/3#2"
    assert Path(RunFolder(Path("r")).crash_path("rollout/3", 2)).name == "rollout-3-2"
