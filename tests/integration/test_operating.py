"""What an operator does to a run while it runs, over hosts: actors killed, rollouts that come and go."""

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from loop_hosts import loop_hosts
from loop_run import (
    ENDLESS_STEPS,
    assert_only_installed_policies_were_sampled,
    assert_trained_in_order,
    assert_trainer_went_on,
)
from watching import eventually

from launcher.errors import OrderError, RunFolderError
from launcher.operating import kill, scale
from launcher.runfolder import RunFolder
from launcher.view import RunView
from relax_actor.app import RunControl
from relax_actor.placement import Seat
from relax_actor.telemetry import read_events

pytestmark = pytest.mark.timeout(120)

SUPPORT = Path(__file__).parents[1] / "support"
SLOW = {"scripted_token_s": 0.02, "replicas": 2}

HEAD = """
    import sys, time
    from pathlib import Path
    from operated_actors import Slow
    from relax_actor import Backoff, ChildSpec, Elastic, Home, Supervisor, SupervisorSpec
    from relax_actor.supervision.hosts import Host

    WAY = 'while [ -e "$1/away" ]; do sleep 0.02; done; shift; exec env X=1 "$@"'

    if __name__ == "__main__":
        hosts = [
            Host(name="a", address="127.0.0.1"),
            Host(name="b", prefix=("sh", "-c", WAY, "sh", sys.argv[1]), address="127.0.0.1"),
        ]
        homes = tuple(Home(host=name) for name in ("a", "b", "a", "b"))
        child = ChildSpec(
            id="rollout", actor=Slow, replicas=2, always_indexed=True, homes=homes,
            elastic=Elastic(least=1, most=8, drain_s=60.0),
        )
        spec = SupervisorSpec(id="root", children=(child,), backoff=Backoff(base_s=0.01))
        with Supervisor(spec, run_dir=Path(sys.argv[1]), hosts=hosts, address="127.0.0.1") as tree:
            print("ready", flush=True)
            sys.stdin.read()
"""


class Operated:
    """A run whose head is another process, and the command line to it."""

    def __init__(self, path):
        self.path = path
        script = path.with_name("head.py")
        script.write_text(textwrap.dedent(HEAD))
        self._env = os.environ | {"PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.head = subprocess.Popen(
            [sys.executable, str(script), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
        )
        assert self.head.stdout.readline() == b"ready\n"

    def relax(self, name, *words):
        line = [sys.executable, "-m", "relax_actor", name, str(self.path), *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=self._env)
        return done.returncode, done.stdout + done.stderr.replace(str(self.path), "RUN")

    def of(self, kind):
        return [each for each in read_events(self.path / "events.jsonl")[0] if each["kind"] == kind]

    def close(self):
        self.head.stdin.close()
        self.head.stdout.close()
        assert self.head.wait(30) == 0


@pytest.fixture
def operated(tmp_path):
    run = Operated(tmp_path / "run")
    yield run
    if run.head.poll() is None:
        (run.path / "go").touch()
        run.close()


def test_an_actor_is_killed_on_its_host_and_comes_back(operated):
    code, said = operated.relax("kill", "rollout/1")
    assert (code, said.splitlines()[0].partition(";")[0]) == (0, "killed rollout/1#1")
    eventually(lambda: operated.of("child_exited"))  # the command waits for the order alone
    [exited] = operated.of("child_exited")
    assert exited["child"] == "rollout/1"
    assert "SIGKILL" in exited["reason"]
    code, said = operated.relax("why", "rollout/1#1")
    assert "killed by an operator" in said
    assert operated.relax("kill", "rollout/7")[0] == 2
    assert operated.relax("kill", "rollout/1#1")[0] == 2


def test_replicas_come_and_go_and_those_that_go_finish_first(operated):
    """Replicas that leave finish; a number without a place, or out of bounds, changes nothing."""
    code, said = operated.relax("scale", "4")
    assert code == 0
    assert said.splitlines()[-1] == "4 rollouts"
    assert {each["child"]: each["site"] for each in operated.of("child_spawned")} == {
        "rollout/0": "a",
        "rollout/1": "b",
        "rollout/2": "a",
        "rollout/3": "b",
    }
    assert operated.relax("scale", "1", "--timeout", "0.1")[0] == 1
    (operated.path / "go").touch()
    code, said = operated.relax("scale", "1")
    assert code == 0, said
    assert said.splitlines()[-1] == "1 rollouts"
    assert sorted(each["what"] for each in operated.of("finished_first")) == [1, 2, 3]
    assert {each["exit"] for each in operated.of("child_exited")} <= {"stopped", "normal"}
    names = operated.relax("tree")[1]
    assert "rollout/0" in names
    assert "rollout/3" not in names
    for number, words in (("5", "has places for 4 replicas, not for 5"), ("0", "fewer than 1")):
        code, said = operated.relax("scale", number)
        assert code == 1
        assert said.startswith("error: `rollout` ")
        assert words in said


def test_a_second_change_waits_for_the_first(operated):
    assert operated.relax("scale", "1", "--no-wait") == (0, "1 rollouts; rollout/1 finishing what it has\n")
    code, said = operated.relax("scale", "2")
    assert code == 1
    assert said.splitlines() == [
        "error: `rollout` is being scaled to 1: rollout/1",
        "",
        "hint: one change at a time: wait until that is done",
    ]
    (operated.path / "go").touch()
    assert operated.relax("scale", "1")[0] == 0


def test_places_on_a_host_that_is_away_count_again_once_it_is_back(operated):
    """Nobody is sent to a lost host; its own replica waits for it, or shares a place meanwhile."""
    keepers = psutil.Process(operated.head.pid).children()
    [keeper] = [process for process in keepers if process.environ().get("X") == "1"]
    [agent] = keeper.children()
    (operated.path / "away").touch()
    agent.kill()
    eventually(lambda: operated.of("host_lost"))
    view = RunView(RunFolder(operated.path))
    with pytest.raises(OrderError, match="`rollout/3` has its place on b, which is away"):
        scale(view, io.StringIO(), 4)
    assert scale(view, io.StringIO(), 3, timeout_s=30.0) == 0  # the third one's place is on the other host
    (operated.path / "away").unlink()
    eventually(lambda: len(operated.of("host_joined")) == 3)
    assert scale(view, io.StringIO(), 4, timeout_s=30.0) == 0
    sites = {each["child"]: each["site"] for each in operated.of("child_spawned")}
    assert (sites["rollout/2"], sites["rollout/3"]) == ("a", "b")


def test_a_run_that_is_over_takes_no_orders(operated):
    operated.close()
    code, said = operated.relax("scale", "3")
    assert (code, said) == (
        2,
        "error: `RUN` is not running\n\nhint: relax-actor status RUN says how it ended\n",
    )


class Scale:
    """Has a run scaled to these numbers, one after another, when the one before is reached; then it ends."""

    def __init__(self, *numbers):
        self.numbers, self.done, self.control = list(numbers), 0, RunControl()

    def __call__(self, folder):
        events, _ = read_events(folder / "events.jsonl")
        kinds = [event["kind"] for event in events]
        if kinds.count("step") <= self.done * 2 or not self._is_reached(events, kinds):
            return
        if not self.numbers:
            self.control.stop("SIGTERM")
        else:
            assert scale(RunView(RunFolder(folder)), io.StringIO(), self.numbers[0], waits=False) == 0
            self.numbers.pop(0)
            self.done += 1

    def _is_reached(self, events, kinds):
        if kinds.count("child_scaled") < self.done:
            return False
        if not self.done:
            return True
        since = max(index for index, kind in enumerate(kinds) if kind == "child_scaled")
        seen = {"child_active": set(), "child_removed": set()}
        for event in events[since:]:
            seen.get(event["kind"], set()).add(event.get("child"))
        change = events[since]
        return (
            set(change["starting"]) <= seen["child_active"]
            and set(change["leaving"]) <= seen["child_removed"]
        )


def test_a_run_over_hosts_grows_and_shrinks_and_trains_every_prompt_once(run_loop):
    """New replicas sample only what they have installed; those that leave put all of their samples."""
    plan = Scale(4, 1, 3)
    with loop_hosts(3) as hosts:
        spares = tuple(Seat(actor="", host=name) for name in "cb")
        run = run_loop(
            run={"steps": ENDLESS_STEPS},
            rollout=SLOW,
            on_tick=plan,
            control=plan.control,
            **hosts.settings(hosts.rollouts_on("b", "c", spares=spares)),
        )
        hosts.assert_nothing_is_left(run)
    assert run.outcome.exit_code == 143, run.log
    assert not plan.numbers
    assert len(run.trained) == len(set(run.trained))
    assert all(event["balances"] for event in run.of("ledger"))
    assert_only_installed_policies_were_sampled(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert [event["child"] for event in run.of("child_scaled")] == ["rollout"] * 3
    left = {event["child"]: event["exit"] for event in run.of("child_exited") if "rollout" in event["child"]}
    assert {left[name] for name in ("rollout/1", "rollout/2", "rollout/3")} <= {"stopped", "normal"}
    assert not run.of("put_repeated")


def test_orders_that_cannot_be_are_refused_by_the_running_head(run_loop):
    said, control = [], RunControl()

    def on_tick(folder):
        events, _ = read_events(folder / "events.jsonl")
        if not said and any(event["kind"] == "step" for event in events):
            view = RunView(RunFolder(folder))
            for order in (
                lambda: scale(view, io.StringIO(), 9),
                lambda: kill(view, io.StringIO(), "queue#7"),
            ):
                with pytest.raises((OrderError, RunFolderError)) as refusal:
                    order()
                said.append(str(refusal.value))
            control.stop("SIGTERM")

    run = run_loop(
        run={"steps": ENDLESS_STEPS}, rollout={"max_replicas": 3}, control=control, on_tick=on_tick
    )
    assert run.outcome.exit_code == 143, run.log
    assert said[0] == "`rollout` cannot have 9 replicas, more than 3"
