"""Replicas that are spread over hosts: where they are, how they are struck, what holds all the same."""

import os
import signal
from contextlib import suppress

import psutil
from loop_run import (
    assert_active_at_the_end,
    assert_kept_its_promises,
    assert_trained_in_order,
    assert_trainer_went_on,
)

from relax_actor.placement import Placement, Seat
from relax_actor.telemetry import read_events


def over(hosts, *seats):
    """Place rollouts and parts: `rollout/0=a` and so on."""
    pairs = (each.split("=") for each in seats)
    return Placement(
        hosts=tuple(hosts.names), seats=tuple(Seat(actor=actor, host=host) for actor, host in pairs)
    )


def assert_nothing_was_lost(run, hosts, *, is_back=True):
    """I2, I3, I4, I5, I7, I8; the first replica may still be starting where another one goes on."""
    assert_kept_its_promises(run, waits=False)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    if is_back:
        assert_active_at_the_end(run, "rollout/0")
    hosts.assert_nothing_is_left(run)
    assert survivors(run) == []


def survivors(run):
    """Return the servers' main processes that are still there, on either host."""
    pids = {event["server_pid"] for event in (*run.of("engine_started"), *run.of("part_started"))}
    return [pid for pid in pids if psutil.pid_exists(pid)]


class Strikes:
    """Does one thing after another to a replica, each time it has installed a version and a step is done.

    Args:
        whats: which process is killed: `far` and `near` are the servers, `far scheduler` a child of one,
            `part` and `rollout` the actors, `host` the node agent of the part's host; a `stopped part` is
            stopped.
        replica: whose.
    """

    def __init__(self, *whats, replica=0):
        self.waiting, self._struck = list(whats), set()
        self._rollout, self._part = f"rollout/{replica}", f"part/{replica}"

    def are_over(self, events):
        """Whether all was done, and the replica samples after the last of it."""
        active = [each for each in events if (each["kind"], each["actor"]) == ("child_active", self._rollout)]
        return not self.waiting and max(each["inc"] for each in active) > max(self._struck)

    def __call__(self, folder):
        events = read_events(folder / "events.jsonl")[0] if self.waiting else []
        updated = self._last(events, "engine_updated", self._rollout)
        steps = sum(event["kind"] == "step" for event in events)
        if updated is None or updated["inc"] in self._struck or steps <= len(self._struck):
            return
        self._struck.add(updated["inc"])
        near = self._last(events, "engine_started", self._rollout)
        far = self._last(events, "part_started", self._part)
        what = self.waiting.pop(0)
        with suppress(ProcessLookupError):
            self._strike(what, near, far, self._agent_of(events, self._part))

    @staticmethod
    def _agent_of(events, actor):
        """Return the pid of the node agent of an actor's host."""
        spawned = [
            event for event in events if (event["kind"], event.get("child")) == ("child_spawned", actor)
        ]
        joined = [event for event in events if event["kind"] == "host_joined"]
        return next(each["agent_pid"] for each in reversed(joined) if each["host"] == spawned[-1]["site"])

    @staticmethod
    def _strike(what, near, far, agent):
        match what:
            case "far":
                os.kill(far["server_pid"], signal.SIGKILL)
            case "far scheduler":
                os.kill(scheduler_of(far["server_pid"]), signal.SIGKILL)
            case "part":
                os.kill(far["pid"], signal.SIGKILL)
            case "stopped part":  # nobody needs it, until there is to be another server
                os.kill(far["pid"], signal.SIGSTOP)
                os.kill(near["server_pid"], signal.SIGKILL)
            case "near":
                os.kill(near["server_pid"], signal.SIGKILL)
            case "host":  # of the part: whatever follows its agent
                os.kill(agent, signal.SIGKILL)
            case "rollout":
                os.kill(near["pid"], signal.SIGKILL)

    @staticmethod
    def _last(events, kind, actor):
        return next(
            (each for each in reversed(events) if (each["kind"], each["actor"]) == (kind, actor)), None
        )


def scheduler_of(server):
    """Return the pid of a real server's scheduler."""
    children = psutil.Process(server).children(recursive=True)
    return next(each.pid for each in children if "scheduler" in " ".join(each.cmdline()))
