"""When a run is disturbed, and when it has seen enough: by its events, however slow the machine is."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from relax_actor import app
from relax_actor.faults import Action, Fault
from relax_actor.telemetry import Event, read_events


class UntilKilled:
    """Stops a run two steps after so many of its actors were killed, and its rollouts are back.

    Args:
        plan: of the kills.
        control: of the run.
    """

    def __init__(self, plan: Sequence[Fault], control: app.RunControl) -> None:
        self._planned, self._control = Counter(fault.actor for fault in plan), control
        self._until_step: int | None = None

    def __call__(self, folder: Path) -> None:
        """Look at the run's events."""
        events, _ = read_events(folder / "events.jsonl")
        steps = sum(event["kind"] == "step" for event in events)
        if self._until_step is None and self._is_carried_out(events):
            self._until_step = steps + 2
        if self._until_step is not None and steps >= self._until_step:
            self._control.stop("SIGTERM")

    def _is_carried_out(self, events: Sequence[Event]) -> bool:
        killed = Counter(event["child"] for event in events if is_kill(event))
        rollouts = [name for name in self._planned if name.startswith("rollout")]
        return self._planned <= killed and are_active(rollouts, events)


class Rendezvous:
    """Lets a trainer that stands still go on once all rollouts are there, also those that were killed.

    Args:
        rollouts: how many.
    """

    def __init__(self, rollouts: int = 2) -> None:
        self._names = [f"rollout/{n}" for n in range(rollouts)]

    def __call__(self, folder: Path) -> None:
        """Look at the run's events."""
        events, _ = read_events(folder / "events.jsonl")
        trainer = stopped_trainer(events)
        if trainer is not None and are_active(self._names, events):
            trainer.resume()


def are_active(rollouts: Sequence[str], events: Sequence[Event]) -> bool:
    """Whether all of them sample, as far as is known."""
    newest: dict[str, dict[str, int]] = {"child_exited": {}, "child_active": {}}
    for event in events:
        if event["kind"] in newest:
            newest[event["kind"]][event["child"]] = event["incarnation"]
    gone, active = newest.values()
    return all(active.get(name, 0) > gone.get(name, 0) for name in rollouts)


def is_kill(event: Event) -> bool:
    """Whether an actor died of SIGKILL."""
    return event["kind"] == "child_exited" and "SIGKILL" in event["reason"]


def standstill(steps: int) -> Fault:
    """Plan that the trainer stops: these steps are published and saved, and it writes nothing just now."""
    return Fault(actor="trainer", point="batch_leased", nth=steps + 1, action=Action.STOP)


def stopped_trainer(events: Sequence[Event]) -> psutil.Process | None:
    """Return the trainer once it stands still."""
    pids = [each["pid"] for each in events if each["kind"] == "child_spawned" and each["child"] == "trainer"]
    with suppress(psutil.NoSuchProcess):
        trainer = psutil.Process(pids[-1]) if pids else None
        return trainer if trainer and trainer.status() == psutil.STATUS_STOPPED else None
    return None
