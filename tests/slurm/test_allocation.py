"""Inside an allocation: which hosts there are, and a tree over them, whose end leaves nothing."""

import json
import shlex
import sys
from pathlib import Path

import psutil
import pytest
from loop_run import leftovers
from slurm_waits import wait_until

from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"

SURVEY = """
import json, os
from launcher.slurm_hosts import allocation, survey
found = allocation(os.environ)
print(json.dumps([found.here, [[e.name, e.address, e.gpus] for e in survey(found)]]))
"""


def test_every_host_says_which_gpus_it_has_for_us(slurm):
    gpus = ("--gpus-per-node=2",) if slurm.has_gpus else ()
    said = slurm("salloc", "--quiet", "--nodes=2", *gpus, sys.executable, "-c", SURVEY)

    names = ["0", "1"] if slurm.has_gpus else None
    assert json.loads(said) == ["", [["n1", "127.0.0.1", names], ["n2", "127.0.0.1", names]]]


class Tree:
    """`slurm_tree.py` in an allocation."""

    def __init__(self, slurm, run_dir, *, batch=False):
        self.slurm, self.folder = slurm, run_dir
        command = [sys.executable, str(SUPPORT / "slurm_tree.py"), str(run_dir)]
        self.log = run_dir / "head.log"
        self.job = ""
        if batch:
            script = run_dir / "tree.sbatch"
            script.write_text("#!/bin/bash\nexec " + shlex.join(command) + "\n")
            options = ("--nodes=2", "--ntasks-per-node=1", f"--output={self.log}")
            self.job = slurm("sbatch", "--parsable", *options, str(script)).strip()
        else:
            self.salloc = slurm.salloc(*command, log=self.log)
        ready = run_dir / "ready.json"
        try:
            wait_until(ready.exists, "the tree is ready", 90.0)
        except AssertionError:
            agents = "\n".join(each.read_text() for each in (run_dir / "logs").glob("agent*.log"))
            pytest.fail(f"{self.log.read_text()}\n{agents}")
        self.said = json.loads(ready.read_text())
        self.job = self.job or slurm("squeue", "--noheader", "--format=%i").split()[0]
        self.actors = {name: psutil.Process(each["pid"]) for name, each in self.said["actors"].items()}
        self.children = [psutil.Process(each["child"]) for each in self.said["actors"].values()]

    @property
    def head(self):
        [found] = [each for each in psutil.process_iter(["cmdline"]) if self._is_head(each)]
        return found

    def srun(self, node):
        [found] = [each for each in self.head.children() if f"--nodelist={node}" in each.cmdline()]
        return found

    def events(self, kind):
        return [event for event in read_events(self.folder / "events.jsonl")[0] if event["kind"] == kind]

    def steps(self):
        return self.slurm("squeue", "--noheader", "--steps", "--format=%i %N").split("\n")

    def assert_nothing_is_left(self):
        """Check that every process, segment and job step of the tree is gone."""
        left = []

        def is_clean():
            left[:] = [each for each in (*self.actors.values(), *self.children) if each.is_running()]
            left.extend(leftovers(self.folder, self.said["run_id"]))
            left.extend(each for each in psutil.process_iter(["cmdline"]) if self._is_ours(each))
            return not left

        try:
            wait_until(is_clean, "nothing is left", 60.0)
        except AssertionError:
            pytest.fail(f"left: {left}")

    def _is_head(self, process):
        words = process.info["cmdline"] or []
        return str(self.folder) in words and "python" in words[0]

    def _is_ours(self, process):
        words = process.info["cmdline"] or []
        return self._is_head(process) or (f"--jobid={self.job}" in words and "srun" in words[0])


def test_a_tree_spans_the_allocation_and_leaves_nothing(slurm, run_dir):
    tree = Tree(slurm, run_dir)
    (run_dir / "end").touch()
    tree.salloc.wait(60.0)
    assert (run_dir / "done").exists(), tree.log.read_text()
    tree.assert_nothing_is_left()


def test_the_head_on_a_node_of_the_job_starts_its_own_agent_without_srun(slurm, run_dir):
    tree = Tree(slurm, run_dir, batch=True)
    assert sum("n2" in step for step in tree.steps()) == 1
    assert not any(".0 n1" in step or ".1 n1" in step for step in tree.steps())
    (run_dir / "end").touch()
    tree.assert_nothing_is_left()


def test_the_death_of_an_actor_does_not_end_the_job_step(slurm, run_dir):
    tree = Tree(slurm, run_dir)
    before = tree.steps()
    for actor in tree.actors.values():
        actor.kill()
    wait_until(lambda: len(tree.events("child_spawned")) == 4, "both are restarted")
    assert tree.steps() == before
    assert not tree.events("host_lost")
    (run_dir / "end").touch()
    tree.assert_nothing_is_left()


def test_a_host_whose_srun_is_killed_is_cleared_and_joins_again(slurm, run_dir):
    tree = Tree(slurm, run_dir)
    tree.srun("n2").kill()
    wait_until(lambda: not tree.actors["n2"].is_running(), "its actor is gone", 60.0)
    wait_until(lambda: len(tree.events("host_joined")) == 3, "it has joined again", 90.0)
    assert [event["host"] for event in tree.events("host_lost")] == ["n2"]
    assert tree.actors["n1"].is_running()
    (run_dir / "end").touch()
    tree.assert_nothing_is_left()


def test_after_a_kill_of_the_head_every_host_clears_itself(slurm, run_dir):
    tree = Tree(slurm, run_dir)
    tree.head.kill()
    tree.assert_nothing_is_left()


def test_scancel_ends_everything_and_the_head_in_order(slurm, run_dir):
    tree = Tree(slurm, run_dir, batch=True)
    slurm("scancel", tree.job)
    tree.assert_nothing_is_left()
    assert (run_dir / "done").exists(), tree.log.read_text()
