"""What the event log says about a run by now: a pure fold of events.

`RunState.apply` takes one event of any kind; unknown kinds and missing fields change nothing, so that a
newer or older log can still be shown.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from relax_actor.telemetry import Event

KEPT_NEWS = 6
_TOO_LARGE = 1e300  # NaN and infinity are not below it either


class ChildPhase(StrEnum):
    """Where an actor is in its life."""

    STARTING = "starting"
    READY = "ready"
    ACTIVE = "active"
    EXITED = "exited"
    RESTARTING = "restarting"


@dataclass(kw_only=True)
class ChildState:
    """One actor, over all its incarnations."""

    name: str
    phase: ChildPhase = ChildPhase.STARTING
    incarnation: int = 0
    pid: int = 0
    policy_version: int | None = None
    log: str = ""
    reason: str = ""  # of its last exit


@dataclass(kw_only=True)
class RunState:
    """All that a status display shows."""

    run_id: str = ""
    mode: str = ""
    max_staleness: int = 0
    steps: int = 0
    started_at: float = 0.0  # unix seconds
    seen_at: float = 0.0  # unix seconds of the newest event
    children: dict[str, ChildState] = field(default_factory=dict)
    step: Event = field(default_factory=dict)  # the newest
    loaded_step: int = 0  # of the checkpoint that was loaded last
    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=500))  # (step, mean)
    ledger: Event = field(default_factory=dict)
    evals: dict[str, Event] = field(default_factory=dict)  # the newest of each set
    published: int | None = None  # policy version
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    restarts: int = 0
    waiting: str = ""  # why the trainer waits
    news: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_NEWS))
    ended: Event | None = None
    escalated: Event | None = None

    def apply(self, event: Event) -> None:
        """Take one event."""
        self.seen_at = max(self.seen_at, number(event.get("t")))
        handler = getattr(self, f"_on_{event.get('kind')}", None)
        if handler is not None:
            handler(event)

    def _on_run_started(self, event: Event) -> None:
        self.__init__()  # type: ignore[misc]  # the same folder again: a resumed run starts a new tree
        self.run_id, self.mode = str(event.get("run_id", "")), str(event.get("mode", ""))
        self.max_staleness, self.steps = (
            int(number(event.get("max_staleness"))),
            int(number(event.get("steps"))),
        )
        self.started_at = self.seen_at = number(event.get("t"))

    def _on_run_ended(self, event: Event) -> None:
        self.ended = event

    def _on_escalated(self, event: Event) -> None:
        self.escalated = self.escalated or event
        self.news.append(f"{event.get('supervisor')} gave up: {event.get('reason')}")

    def _on_checkpoint_loaded(self, event: Event) -> None:
        self.loaded_step = int(number(event.get("step")))

    def _on_child_spawned(self, event: Event) -> None:
        child = self._child(event)
        child.phase, child.pid = ChildPhase.STARTING, int(number(event.get("pid")))
        child.log, child.policy_version = str(event.get("log", "")), None

    def _on_child_ready(self, event: Event) -> None:
        self._child(event).phase = ChildPhase.READY

    def _on_child_active(self, event: Event) -> None:
        child = self._child(event)
        child.phase, child.policy_version = ChildPhase.ACTIVE, _whole(event.get("policy_version"))

    def _on_child_exited(self, event: Event) -> None:
        child = self._child(event)
        child.phase, child.reason = ChildPhase.EXITED, str(event.get("reason", ""))
        self.news.append(f"{child.name} exited (incarnation {child.incarnation}): {child.reason}")

    def _on_child_restarting(self, event: Event) -> None:
        child = self._child(event)
        child.phase = ChildPhase.RESTARTING
        self.restarts += 1
        delay = number(event.get("delay_s"))
        self.news.append(f"{child.name} restarts in {delay:.1f} s: {event.get('reason', '')}")

    def _on_child_killed(self, event: Event) -> None:
        self.news.append(f"{event.get('child')} is killed: {event.get('reason')}")

    def _on_host_lost(self, event: Event) -> None:
        host, actors = event.get("host"), event.get("actors")
        self.news.append(f"host {host} is lost with {actors} actors: {event.get('reason')}")

    def _on_policy_published(self, event: Event) -> None:
        self.published = _whole(event.get("version"))

    def _on_policy_installed(self, event: Event) -> None:
        child = self.children.get(str(event.get("actor")))
        is_up = child is not None and child.phase in {
            ChildPhase.STARTING,
            ChildPhase.READY,
            ChildPhase.ACTIVE,
        }
        if (
            child is not None and is_up and child.incarnation == event.get("inc")
        ):  # another host's may come late
            child.phase, child.policy_version = ChildPhase.ACTIVE, _whole(event.get("version"))

    def _on_step(self, event: Event) -> None:
        self.waiting = ""
        self.rewards.append((int(number(event.get("step"))), number(event.get("reward_mean"))))
        if number(event.get("step")) >= number(self.step.get("step")):  # a late step is kept, not shown
            self.step = event

    def _on_sample_dropped(self, event: Event) -> None:
        reason = str(event.get("reason", ""))
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        what = f"sample {event.get('group_id')}.{event.get('sample_index')}"
        self.news.append(f"{what} dropped ({event.get('origin', '')}): {reason}")

    def _on_group_dropped(self, event: Event) -> None:
        reason = str(event.get("reason", ""))
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.news.append(f"group {event.get('group_id')} dropped ({event.get('origin', '')}): {reason}")

    def _on_ledger(self, event: Event) -> None:
        self.ledger = event

    def _on_eval(self, event: Event) -> None:
        self.evals[str(event.get("eval_set", ""))] = event

    def _on_trainer_waits(self, event: Event) -> None:
        self.waiting = str(event.get("reason", ""))

    def _child(self, event: Event) -> ChildState:
        """Return the actor of an event; an event of an older incarnation gets a copy that nobody sees."""
        name = str(event.get("child", ""))
        child = self.children.setdefault(name, ChildState(name=name))
        incarnation = int(number(event.get("incarnation")))
        if incarnation < child.incarnation:
            return ChildState(name=name, incarnation=incarnation)
        child.incarnation = incarnation
        return child


def number(value: Any) -> float:
    """Return a field as a finite number; 0 for anything that is none, a NaN's text included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if abs(value) < _TOO_LARGE else 0.0


def _whole(value: Any) -> int | None:
    return int(number(value)) if isinstance(value, (int, float)) else None
