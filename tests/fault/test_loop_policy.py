"""A replica gets its policy version whatever is left of the run, and the trainer takes no part."""

import os
import signal

import pytest
from loop_faults import standstill, stopped_trainer
from loop_run import (
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_trained_in_order,
    assert_trainer_went_on,
    kills,
)

from relax_actor.engines.sglang.watch import is_ending
from relax_actor.faults import Action, Fault
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

VICTIM = "rollout/0"


STANDSTILL = standstill(2)


class StoppedTrainer:
    """Kills a rollout while the trainer stands still, which goes on once the rollout is back.

    Args:
        sweep: remove all policy versions from shared memory while the trainer is stopped.
        lives: which incarnation of the rollout has to come back.
        together_with: who is to die as well; until then the rollout is killed once more when it is back.
    """

    def __init__(self, *, sweep=False, lives=2, together_with=""):
        self._sweep, self._lives, self._together_with = sweep, lives, together_with
        self.stopped_at = self.continued_at = 0.0
        self._trainer = None

    def __call__(self, folder):
        events, _ = read_events(folder / "events.jsonl")
        if not self.stopped_at:
            self._kill_when_stopped(events)
        elif not self.continued_at:
            back = [each for each in events if each["kind"] == "child_active" and each["child"] == VICTIM]
            if back and back[-1]["incarnation"] >= self._lives:
                self._go_on(back[-1], events)

    def _go_on(self, back, events):
        other = [each["pid"] for each in spawns_of(self._together_with, events)]
        if other and not is_ending(other[0]):  # it did not answer in time: nothing was borrowed
            self._lives += 1
            os.kill(back["pid"], signal.SIGKILL)
        else:
            self.continued_at = back["m"]
            self._trainer.resume()

    def _kill_when_stopped(self, events):
        self._trainer = stopped_trainer(events)
        if self._trainer is None:
            return
        spawned = {event["child"]: event for event in events if event["kind"] == "child_spawned"}
        self.stopped_at = max(event["m"] for event in events)
        if self._sweep:
            space = ShmSpace(next(event["run_id"] for event in events if "run_id" in event))
            space.sweep("dcs")
            space.sweep("dcs-latest")
        os.kill(spawned[VICTIM]["pid"], signal.SIGKILL)

    def installed(self, run):
        """Return what the victim's last life installed while the trainer was stopped."""
        return [
            event
            for event in run.of("policy_installed", actor=VICTIM, inc=self._lives)
            if self.stopped_at <= event["m"] <= self.continued_at
        ]


def spawns_of(actor, events):
    return [each for each in events if each["kind"] == "child_spawned" and each["child"] == actor]


@pytest.mark.parametrize("engine", ["scripted", "transformers"])
def test_a_killed_rollout_is_brought_to_the_current_version_while_the_trainer_is_stopped(run_loop, engine):
    """I4, I5, I7: the trainer takes no part."""
    stopped = StoppedTrainer()
    run = run_loop(plan=[STANDSTILL], on_tick=stopped, rollout={"engine": engine}, run={"steps": 6})
    assert stopped.continued_at, run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert_active_at_the_end(run, VICTIM)
    newest = max(event["version"] for event in run.of("policy_published") if event["m"] < stopped.stopped_at)
    assert [(event["version"] >= newest, event["route"]) for event in stopped.installed(run)] == [
        (True, "shared_memory")
    ]
    assert not [e for e in run.of("step") if stopped.stopped_at + 0.5 < e["m"] < stopped.continued_at]


@pytest.mark.parametrize("engine", ["scripted", "transformers"])
def test_with_shared_memory_gone_a_rollout_borrows_from_the_other_one(run_loop, engine):
    """I4, I5, I7: also if it is killed while it does; later versions come through shared memory again."""
    stopped = StoppedTrainer(sweep=True, lives=4)
    plan = [
        STANDSTILL,
        Fault(actor=VICTIM, point="install_bucket", incarnation=2),
        Fault(actor=VICTIM, point="install_copied", incarnation=3),
    ]

    def follows(events):
        mine = [event for event in events if (event["actor"], event["inc"]) == (VICTIM, 4)]
        installed = [event["route"] for event in mine if event["kind"] == "policy_installed"]
        return "shared_memory" in installed

    run = run_loop.until(follows, plan=plan, on_tick=stopped, rollout={"engine": engine})
    assert stopped.continued_at, run.log
    assert run.killed == [VICTIM] * 3
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    first = stopped.installed(run)[0]
    assert (first["route"], first["failed_routes"]) == ("peer", ["shared_memory"])


def test_with_all_of_it_gone_a_rollout_reads_the_newest_checkpoint(run_loop):
    """I4, I7: and goes on to newer versions from there."""
    stopped = StoppedTrainer(sweep=True)
    run = run_loop(
        plan=[STANDSTILL],
        on_tick=stopped,
        rollout={"replicas": 1, "engine": "transformers"},
        run={"steps": 5},
        train={"checkpoint_every": 1},
    )
    assert stopped.continued_at, run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert stopped.installed(run)[0]["route"] == "disk"


def test_a_rollout_whose_lender_dies_takes_what_is_left(run_loop):
    """I5, I7: the lender is killed at its first part; the borrower reads the checkpoint."""
    stopped = StoppedTrainer(sweep=True, together_with="rollout/1")
    plan = [STANDSTILL, *kills("rollout/1", "policy_lent")]
    run = run_loop(plan=plan, on_tick=stopped, run={"steps": 5}, train={"checkpoint_every": 1})
    assert stopped.continued_at, run.log
    assert set(run.killed) == {VICTIM, "rollout/1"}
    assert run.killed.count("rollout/1") == 1
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert stopped.installed(run)[0]["route"] == "disk"


def test_one_rollout_decodes_on_while_the_other_one_installs(run_loop):
    """I3: the pool never stands still, and who waited for its turn says so, whichever was the first."""
    slow = [
        Fault(actor=name, point="install_copied", nth=nth, action=Action.DELAY, seconds=1.0)
        for name in (VICTIM, "rollout/1")
        for nth in (3, 4)
    ]
    run = run_loop(
        plan=slow,
        run={"steps": 6, "max_staleness": 3},
        rollout={"scripted_token_s": 0.2, "max_new_tokens": 12},
    )
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    waited = [event for event in run.of("policy_installed") if event["waited_s"] > 0]
    assert waited, run.log
    assert any(decoded_during_an_install(run, event) for event in waited), run.log


def decoded_during_an_install(run, waited):
    """Whether a rollout that waited for its turn decoded while the other one, which had it, installed."""
    until = waited["t"] - waited["seconds"]
    wait = {"start": until - waited["waited_s"], "dur_s": waited["waited_s"]}
    others = [each for each in run.of("span", name="install") if each["actor"] != waited["actor"]]
    installs = [each for each in others if overlap(each, wait)]
    decoding = run.of("span", name="generate", actor=waited["actor"])
    return any(overlap(install, span) for install in installs for span in decoding)


def overlap(a, b):
    return max(a["start"], b["start"]) < min(a["start"] + a["dur_s"], b["start"] + b["dur_s"])
