"""`relax-actor launch` by Slurm: inside salloc, submitted, cancelled, preempted and put back into the queue.

The model is tiny and the engine scripted, so that a step takes a moment; what is checked is that every prompt
is trained once, whichever attempt did it, and that nothing is left.
"""

import json
import re
import sys

import psutil
import pytest
from loop_run import loop_config, processes_of
from slurm_waits import wait_until

from launcher.toml import to_toml
from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

LAUNCH = (sys.executable, "-P", "-m", "relax_actor", "launch")
GROUPS_PER_STEP = 4
FIRST_STEPS = 3


class Launch:
    """A launch with a run folder, as words and as what it left there."""

    def __init__(self, slurm, run_dir, tiny_model):
        self.slurm, self.folder, self._tiny_model = slurm, run_dir / "run", tiny_model
        self.config = run_dir / "run.toml"
        self.told = run_dir / "told"  # see `until_told`

    def words(self, **sections):
        self.config.write_text(to_toml(loop_config(self._tiny_model, **sections)))
        return [*LAUNCH, str(self.config), "--run-dir", str(self.folder), "--plain"]

    def submit(self, *words, steps, **sections):
        """Submit a job of both nodes and return its number."""
        argv = [*self.words(run={"steps": steps}, **sections), "--slurm", "--nodes", "2", *words]
        found = re.search(r"submitted job (\d+)", self.slurm(*argv))
        return found[1]

    def until_told(self):
        """Return settings of a run whose first steps are quick, and none after them until `told` is there."""
        beyond = {"slow_from": FIRST_STEPS * GROUPS_PER_STEP, "until": str(self.told)}
        rows = self._tiny_model.rows(60).read_text().splitlines()
        path = self.told.with_name("rows.jsonl")
        path.write_text("".join(json.dumps(json.loads(row) | beyond) + "\n" for row in rows))
        return {"data": {"path": str(path)}, "reward": {"function": "user_rewards:unhurried"}}

    def go_on_quickly_once_it_has_ended(self):
        try:
            wait_until(lambda: self.events("run_ended"), "the first attempt has ended")
        except AssertionError:
            pytest.fail(self.log)
        self.told.touch()

    def events(self, kind=""):
        file = self.folder / "events.jsonl"
        events = read_events(file)[0] if file.exists() else []
        return [event for event in events if not kind or event["kind"] == kind]

    @property
    def log(self):
        logs = [*self.folder.glob("attempt_*/head.log"), *self.folder.glob("*.out")]
        logs += self.folder.glob("logs/agent*.log")
        return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)

    @property
    def history(self):
        """The steps that lead to the final weights."""
        history = []
        for event in self.events("step"):
            history = [*(each for each in history if each["step"] < event["step"]), event]
        return history

    def assert_each_prompt_was_trained_once(self, steps):
        assert [event["step"] for event in self.history] == list(range(1, steps + 1)), self.log
        trained = sorted(group for event in self.history for group in event["groups"])
        assert trained == list(range(steps * GROUPS_PER_STEP))

    def assert_nothing_is_left(self):
        try:
            wait_until(lambda: not self._left(), "nothing is left", 60.0)
        except AssertionError:
            pytest.fail(f"left: {self._left()}")

    def _left(self):
        mine = [each for each in psutil.process_iter(["cmdline"]) if str(self.folder) in str(each.info)]
        return [*processes_of(self.folder), *mine, *self.slurm.segments()]

    def wait_for_steps(self, count):
        try:
            wait_until(lambda: len(self.events("step")) >= count, f"{count} steps")
        except AssertionError:
            pytest.fail(self.log)

    def wait_for_state(self, job, *states):
        try:
            wait_until(lambda: self.slurm.state(job) in states, f"job {job} is {states}")
        except AssertionError:
            pytest.fail(f"{self.slurm.state(job)}\n{self.log}")


@pytest.fixture
def launch(slurm, run_dir, tiny_model):
    slurm.need_two_memories()
    return Launch(slurm, run_dir, tiny_model)


def test_inside_salloc_the_run_takes_both_nodes(launch, slurm, run_dir):
    log = run_dir / "salloc.log"
    salloc = slurm.salloc(*launch.words(run={"steps": 4}), log=log)
    assert salloc.wait(150.0) == 0, log.read_text()
    assert {event["host"] for event in launch.events("host_joined")} == {"n1", "n2"}
    launch.assert_each_prompt_was_trained_once(4)
    launch.assert_nothing_is_left()


def test_a_submitted_run_is_done_in_one_attempt(launch):
    job = launch.submit(steps=4)
    launch.wait_for_state(job, "COMPLETED")
    assert (launch.folder / "attempt_0" / "head.log").exists()
    assert {event["host"] for event in launch.events("host_joined")} == {"n1", "n2"}
    launch.assert_each_prompt_was_trained_once(4)
    launch.assert_nothing_is_left()


def test_the_warning_before_the_time_limit_puts_the_run_back_and_it_goes_on(launch, slurm):
    """USR2 reaches the batch shell alone, as Slurm sends it by `--signal=B:USR2@180`."""
    job = launch.submit("--requeue", steps=8, **launch.until_told())
    launch.wait_for_steps(FIRST_STEPS)
    slurm("scancel", "--batch", "--signal=USR2", job)
    launch.go_on_quickly_once_it_has_ended()
    launch.wait_for_state(job, "COMPLETED")
    assert [event["exit_code"] for event in launch.events("run_ended")] == [140, 0]
    assert sorted(each.name for each in launch.folder.glob("attempt_*")) == ["attempt_0", "attempt_1"]
    steps = [event["step"] for event in launch.events("step")]
    assert steps == list(range(1, 9)), "no step was done twice"
    launch.assert_each_prompt_was_trained_once(8)
    launch.assert_nothing_is_left()


def test_scancel_keeps_a_checkpoint_and_leaves_nothing(launch, slurm):
    job = launch.submit("--requeue", steps=500, **launch.until_told())
    launch.wait_for_steps(2)
    slurm("scancel", job)
    launch.wait_for_state(job, "CANCELLED")
    launch.assert_nothing_is_left()
    assert [event["exit_code"] for event in launch.events("run_ended")] == [143], launch.log
    assert launch.events("checkpoint_saved"), launch.log


def test_a_preemption_by_slurm_itself_is_resumed_from_the_checkpoint(launch, slurm):
    """Slurm sends TERM to every process of the job, and puts it back once all of them are gone."""
    job = launch.submit("--requeue", steps=8, **launch.until_told())
    launch.wait_for_steps(FIRST_STEPS)
    slurm("scontrol", "requeue", job)
    launch.go_on_quickly_once_it_has_ended()
    launch.wait_for_state(job, "COMPLETED")
    assert [event["exit_code"] for event in launch.events("run_ended")] == [143, 0]
    launch.assert_each_prompt_was_trained_once(8)
    launch.assert_nothing_is_left()
