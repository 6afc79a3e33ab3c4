"""When a run is disturbed, and when it has seen enough: by its events, however slow the machine is."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from relax_actor import app
from relax_actor.faults import Action, Fault
from relax_actor.telemetry import Event, read_events


class Until:
    """Stops a run some steps after something was seen in its events.

    Args:
        seen: whether it was; asked until it says so.
        control: of the run.
        inner: called before.
        more_steps: how many steps are to follow.
    """

    def __init__(
        self,
        seen: Callable[[Sequence[Event]], object],
        control: app.RunControl,
        inner: Callable[[Path], object],
        *,
        more_steps: int,
    ) -> None:
        self._seen, self._control, self._inner, self._more_steps = seen, control, inner, more_steps
        self._until_step: int | None = None

    def __call__(self, folder: Path) -> None:
        """Look at the run's events."""
        self._inner(folder)
        events, _ = read_events(folder / "events.jsonl")
        steps = sum(event["kind"] == "step" for event in events)
        if self._until_step is None and self._seen(events):
            self._until_step = steps + self._more_steps
        if self._until_step is not None and steps >= self._until_step:
            self._control.stop("SIGTERM")


def carried_out(plan: Sequence[Fault]) -> Callable[[Sequence[Event]], bool]:
    """Return whether so many of a run's actors were killed, and its rollouts are back."""
    planned = Counter(fault.actor for fault in plan if fault.action is Action.KILL)
    rollouts = [name for name in planned if name.startswith("rollout")]

    def seen(events: Sequence[Event]) -> bool:
        killed = Counter(event["child"] for event in events if is_kill(event))
        return planned <= killed and are_active(rollouts, events)

    return seen


def is_active_again(actor: str, events: Sequence[Event]) -> bool:
    """Whether another incarnation of a rollout than the first samples, or has sampled."""
    active = [each for each in events if each["kind"] == "child_active" and each["child"] == actor]
    return any(each["incarnation"] > 1 for each in active)


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
