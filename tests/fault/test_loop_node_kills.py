"""The processes behind the actors die: the one that forks them, and the one that watches them."""

from contextlib import suppress

import psutil
import pytest
from loop_faults import standstill, stopped_trainer
from loop_run import assert_kept_its_promises, assert_trained_in_order, assert_trainer_went_on

from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]


class Killer:
    """Kills processes found by way of the trainer's parent while the trainer stands still.

    Args:
        victims: the processes to kill, given the node agent and the events.
    """

    def __init__(self, victims):
        self._victims, self.killed = victims, []

    def __call__(self, folder):
        events, _ = read_events(folder / "events.jsonl")
        trainer = stopped_trainer(events)
        if trainer is not None and not self.killed:
            self.killed = self._victims(trainer.parent(), events)
            for process in self.killed:
                process.kill()
            with suppress(psutil.NoSuchProcess):  # it went with its agent
                trainer.resume()


def zygotes_and_a_rollout(agent, events):
    actors = {event["pid"] for event in events if event["kind"] == "child_spawned"}
    zygotes = [child for child in agent.children() if child.pid not in actors]
    assert len(zygotes) == 2
    rollout = next(event["pid"] for event in events if event.get("child") == "rollout/0" and "pid" in event)
    return [*zygotes, psutil.Process(rollout)]


def test_what_forks_the_actors_is_replaced_when_the_next_one_is_needed(run_loop):
    """I5: its death alone is not even noticed; a rollout that dies after it comes back all the same."""
    killer = Killer(zygotes_and_a_rollout)
    run = run_loop(plan=[standstill(2)], rollout={"replicas": 1, "scripted_token_s": 0.05}, on_tick=killer)
    assert killer.killed
    assert_kept_its_promises(run, waits=False)  # the trainer waits for what the next zygote imports
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert run.of("child_restarting", child="rollout/0"), run.log


def test_the_death_of_the_node_agent_costs_the_steps_since_the_checkpoint(run_loop):
    """I2, I7, I8: every actor dies with it and comes back; the queue finds its rows where they were."""
    killer = Killer(lambda agent, _events: [agent])
    run = run_loop(
        plan=[standstill(3)],
        run={"steps": 6},
        rollout={"scripted_token_s": 0.05},
        train={"checkpoint_every": 2},
        on_tick=killer,
    )
    assert killer.killed
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert [event["step"] for event in run.of("checkpoint_loaded")] == [2], run.log
