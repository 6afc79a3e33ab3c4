"""A run can be looked into from another terminal: what lives, why something died, and where it is now."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from watching import eventually

SUPPORT = Path(__file__).parents[1] / "support"

HEAD = """
    import sys, time
    from pathlib import Path
    from sample_actors import Busy, Counter
    from relax_actor import Backoff, ChildSpec, Intensity, Strategy, Supervisor, SupervisorSpec

    if __name__ == "__main__":
        pair = SupervisorSpec(
            id="pair",
            strategy=Strategy.ONE_FOR_ALL,
            intensity=Intensity(restarts=50),
            backoff=Backoff(base_s=0.01, cap_s=0.05),
            children=(ChildSpec(id="left", actor=Counter), ChildSpec(id="right", actor=Counter)),
        )
        spec = SupervisorSpec(
            id="root",
            intensity=Intensity(restarts=50),
            backoff=Backoff(base_s=0.01, cap_s=0.05),
            children=(ChildSpec(id="busy", actor=Busy, replicas=3), pair),
        )
        with Supervisor(spec, run_dir=Path(sys.argv[1])) as tree:
            busy = [tree.ref(f"busy/{replica}", Busy) for replica in range(3)]
            for each in busy:
                each.within(600).ask(Busy.spin, 600.0)
            while any(each.control.status().result()["method"] != "spin" for each in busy):
                time.sleep(0.01)
            print("ready", flush=True)
            time.sleep(600)
"""


class Run:
    """A run whose head is another process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        script = path.with_name("head.py")
        script.write_text(textwrap.dedent(HEAD))
        self._env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        }
        command = [sys.executable, str(script), str(path)]
        self.head = subprocess.Popen(command, stdout=subprocess.PIPE, env=self._env)
        assert self.head.stdout.readline() == b"ready\n"

    def relax(self, *arguments: str) -> str:
        """Run a command on the run folder; return what it prints."""
        done = self.command(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess:
        line = [sys.executable, "-m", "relax_actor", name, str(self.path), *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=self._env)

    def rows(self) -> list[dict]:
        return json.loads(self.relax("ps", "--json"))

    def row(self, actor: str) -> dict:
        return next(row for row in self.rows() if row["actor"] == actor)

    def why(self, actor: str) -> dict:
        return json.loads(self.relax("why", actor, "--json"))

    def kill(self, actor: str) -> int:
        pid = self.row(actor)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that the tests share: each kills actors of its own."""
    with started(tmp_path_factory.mktemp("seeing") / "run") as run:
        yield run


@pytest.fixture(autouse=True)
def all_are_back(request):
    """Wait for those that were killed before."""
    if "run" in request.fixturenames:
        rows = request.getfixturevalue("run").rows
        eventually(lambda: all(row["state"] == "ready" for row in rows()))


@contextmanager
def started(path):
    run = Run(path)
    family = psutil.Process(run.head.pid).children(recursive=True)
    try:
        yield run
    finally:
        if run.head.poll() is None:
            family += psutil.Process(run.head.pid).children(recursive=True)
            run.head.send_signal(signal.SIGCONT)
            run.head.kill()
            run.head.communicate()
        eventually(lambda: not any(process.is_running() for process in family))


def test_ps_and_tree_show_every_actor_with_its_process(run):
    rows = run.rows()

    assert [row["actor"] for row in rows] == ["busy/0", "busy/1", "busy/2", "left", "right"]
    assert all(psutil.Process(row["pid"]).is_running() and row["rss_bytes"] > 0 for row in rows)
    assert {row["method"] for row in rows if row["actor"] == "busy/2"} == {"spin"}
    assert "├─ busy/1" in run.relax("tree")
    assert json.loads(run.relax("tree", "--json"))["children"][3]["supervisor"] == "pair"
    assert run.relax("top", "-n", "1").count("busy/") == 3


def test_the_stack_of_a_busy_actor_shows_the_line_it_is_in(run):
    def frames_that_spin():
        threads = json.loads(run.relax("stack", "busy/2", "--json"))
        (main,) = (thread for thread in threads if thread["is_current"])
        return main["frames"] if "spin_here" in str(main["frames"]) else None

    frames = eventually(frames_that_spin)
    functions = [frame["function"] for frame in frames]
    source = (SUPPORT / "sample_actors.py").read_text().splitlines()
    frame = frames[functions.index("spin_here")]
    assert source[frame["line"] - 1].strip() in {"while time.monotonic() < until:", "pass"}
    assert run.row("busy/2")["incarnation"] == 1, "it goes on undisturbed"


def test_why_names_the_signal_the_log_and_the_crash_folder(run):
    incarnation = run.row("busy/1")["incarnation"]
    pid = run.kill("busy/1")
    eventually(lambda: run.row("busy/1")["incarnation"] == incarnation + 1)

    text = run.relax("why", f"busy/1#{incarnation}")

    assert text.startswith(f"busy/1 (incarnation {incarnation}, pid {pid}) died: SIGKILL, ")
    assert " s into spin (call " in text.splitlines()[0]
    assert "\nin     spin, call " in text
    assert str(run.path / "logs" / f"busy-1-{incarnation}.log") in text
    assert "hint: SIGKILL without a traceback is most often host memory" in text
    crash = run.path / "crash" / f"busy-1-{incarnation}"
    eventually((crash / "memory.txt").exists)
    assert json.loads((crash / "exit.json").read_text())["signal"] == signal.SIGKILL
    assert (crash / "log.txt").read_text() == (run.path / "logs" / f"busy-1-{incarnation}.log").read_text()


def test_why_begins_with_the_death_that_took_another_actor_down(run):
    incarnation = run.row("right")["incarnation"]
    run.kill("right")
    eventually(lambda: run.row("left")["state"] == "ready" and run.row("left")["last_exit"])

    found = run.why("left")

    assert [link["who"] for link in found["chain"]] == [f"right#{incarnation}", f"left#{incarnation}"]
    assert run.relax("why", "left").startswith(f"right (incarnation {incarnation}")


def test_everything_works_while_the_head_is_stopped(tmp_path):
    with started(tmp_path / "run") as run:
        run.head.send_signal(signal.SIGSTOP)
        eventually(lambda: "stopped by a signal" in run.relax("ps"))
        eventually(lambda: "spin_here" in run.relax("stack", "busy/0"))
        pid = run.kill("busy/0")
        eventually(lambda: run.why("busy/0")["signal"] == signal.SIGKILL)
        text = run.relax("why", "busy/0")
        assert text.startswith(f"busy/0 (incarnation 1, pid {pid}) died: SIGKILL; log: ")
        assert "\nin     spin, call " in text
        assert run.row("busy/0")["state"] == "exited"
        assert "busy/0" in run.relax("tree")
        assert "process_exited" in run.relax("events", "--actor", "busy/0")
        assert run.relax("dead-letters") == "no dead letters\n"
        assert "busy/0#1 │ spinning" in run.relax("logs", "busy/0", "-n", "100")


def test_why_says_that_the_end_of_the_head_ended_its_actors(tmp_path):
    with started(tmp_path / "run") as run:
        run.head.kill()
        run.head.communicate()
        eventually(lambda: run.row("left")["state"] == "exited")
        assert "head: gone" in run.relax("ps")
        hint = "hint: it was killed on purpose: by its node agent: its head "
        eventually(lambda: hint in run.relax("why", "left"))


def test_an_actor_that_does_not_exist_is_an_error_with_the_nearest_name(run):
    done = run.command("why", "bussy/0")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: `bussy/0` is not an actor of `{run.path}`\n\nhint: did you mean busy/0?\n"
