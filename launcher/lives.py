"""Every start and every end of every actor of a run, from its event log: a pure fold.

`runstate` folds the same log into what the loop did; this is who lived when and why it ended. What an
event leaves out stays unknown, and unknown kinds change nothing, so that older and newer logs can be read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from launcher.runstate import number
from relax_actor.telemetry import Event


class Phase(StrEnum):
    """Where an actor or a supervisor is in its life."""

    WAITING = "waiting"  # its turn to start has not come
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    RESTARTING = "restarting"  # ended, and will be started again when its delay is over
    EXITED = "exited"
    ENDED = "ended"  # over, and its restart type says to leave it
    FAILED = "failed"  # a supervisor that gave up


ALIVE = frozenset({Phase.STARTING, Phase.READY, Phase.STOPPING})
"""Phases in which an actor has a process."""


@dataclass(kw_only=True)
class Life:
    """One incarnation of one actor; times are unix seconds, 0 where it has not come to that."""

    name: str
    incarnation: int
    pid: int = 0
    start_ticks: int | None = None  # of the process, since boot; with the pid it is never reused
    host: str = ""  # as it calls itself
    site: str = ""  # the same host, as the tree names it; empty where the log does not say
    shm_root: str = ""
    log: str = ""
    spawned_at: float = 0.0
    ready_at: float = 0.0
    ended_at: float = 0.0
    phase: Phase = Phase.STARTING
    reason: str = ""  # how it ended, as the head put it
    line: str = ""  # its death line
    kind: str = ""  # of its exit, as `relax_actor.supervision.events.ExitKind`
    code: int | None = None
    signal: int | None = None
    killed: str = ""  # why it was killed on purpose, if it was
    delay_s: float | None = None  # until its next start, if there is to be one

    @property
    def is_over(self) -> bool:
        """Whether its process is gone."""
        return self.ended_at > 0

    @property
    def is_failure(self) -> bool:
        """Whether it ended otherwise than by finishing or by doing as it was told."""
        return self.is_over and self.kind not in {"normal", "stopped"}

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


@dataclass(kw_only=True)
class SupervisorLife:
    """Where one supervisor is."""

    name: str
    phase: Phase = Phase.STARTING
    reason: str = ""


@dataclass(kw_only=True)
class Outline:
    """Who is below whom, in the order in which they start."""

    name: str
    children: "list[Outline] | None" = None  # None for an actor

    def actors(self) -> Iterator[str]:
        """Return the names of the actors below, or its own."""
        if self.children is None:
            yield self.name
        for child in self.children or ():
            yield from child.actors()

    def path_to(self, name: str) -> list[str]:
        """Return the supervisors above a name, the nearest last; empty where it is not below."""
        for child in self.children or ():
            if child.name == name:
                return [self.name]
            if below := child.path_to(name):
                return [self.name, *below]
        return []


@dataclass(kw_only=True)
class Lives:
    """All that the log says by now about the run's newest tree."""

    run_id: str = ""
    host: str = ""
    shm_root: str = ""
    shm_roots: dict[str, str] = field(default_factory=dict)  # of sites
    address: str = ""  # of the head, for who is on its host
    head_pid: int = 0
    head_start_ticks: int | None = None
    outline: Outline | None = None
    actors: dict[str, list[Life]] = field(default_factory=dict)  # incarnations in their order
    supervisors: dict[str, SupervisorLife] = field(default_factory=dict)
    links: list[Event] = field(default_factory=list)  # events that say what followed from what
    ended: Event | None = None

    def apply(self, event: Event) -> None:
        """Take one event."""
        handler = getattr(self, f"_on_{event.get('kind')}", None)
        if handler is not None:
            handler(event)

    @property
    def names(self) -> list[str]:
        """All actors: those of the tree in its order, then those that have left it."""
        planned = list(self.outline.actors()) if self.outline else []
        return planned + sorted(self.actors.keys() - set(planned))

    def last(self, name: str) -> Life | None:
        """Return the newest incarnation of an actor that has been started."""
        lives = self.actors.get(name)
        return lives[-1] if lives else None

    def life(self, name: str, incarnation: int) -> Life | None:
        """Return one incarnation, if there was one."""
        return next((life for life in self.actors.get(name, ()) if life.incarnation == incarnation), None)

    def _on_run_started(self, _event: Event) -> None:
        self.__init__()  # type: ignore[misc]  # the same folder again: a resumed run has a new tree

    def _on_tree_started(self, event: Event) -> None:
        self.__init__()  # type: ignore[misc]  # as above
        self.run_id, self.host = str(event.get("run_id", "")), str(event.get("host", ""))
        self.shm_root, self.head_pid = str(event.get("shm_root", "")), int(number(event.get("pid")))
        self.head_start_ticks = _whole(event.get("start_ticks"))
        self.address = str(event.get("address", ""))
        self._on_tree_changed(event)

    def _on_tree_changed(self, event: Event) -> None:
        self.outline = _outline(event.get("tree"))

    def _on_run_ended(self, event: Event) -> None:
        self.ended = event

    def _on_child_spawned(self, event: Event) -> None:
        life = self._life(event)
        life.phase, life.pid = Phase.STARTING, int(number(event.get("pid")))
        life.start_ticks, life.log = _whole(event.get("start_ticks")), str(event.get("log", ""))
        life.spawned_at, life.host = number(event.get("t")), str(event.get("host") or self.host)
        life.site = str(event.get("site", ""))
        life.shm_root = self.shm_roots.get(life.site, self.shm_root)

    def _on_child_ready(self, event: Event) -> None:
        life = self._life(event)
        life.phase, life.ready_at = Phase.READY, number(event.get("t"))

    def _on_child_killed(self, event: Event) -> None:
        self._life(event).killed = str(event.get("reason", ""))

    def _on_lease_ended(self, event: Event) -> None:
        for lives in self.actors.values():
            is_there = lives[-1].site in {"", event.get("site", "")} or "site" not in event
            if lives[-1].phase in ALIVE and is_there:
                lives[-1].killed = f"by its node agent: {event.get('reason')}"

    def _on_process_exited(self, event: Event) -> None:
        self._end(event)

    def _on_child_exited(self, event: Event) -> None:
        life = self._end(event)
        life.reason, life.line = str(event.get("reason", "")), str(event.get("line", ""))
        life.kind = str(event.get("exit", ""))

    def _on_child_restarting(self, event: Event) -> None:
        self.links.append(event)
        name = str(event.get("child", ""))
        if name in self.supervisors:
            self.supervisors[name].phase = Phase.RESTARTING
            return
        life = self._life(event)
        life.phase, life.delay_s = Phase.RESTARTING, number(event.get("delay_s"))

    def _on_child_ended(self, event: Event) -> None:
        name = str(event.get("child", ""))
        if name in self.supervisors:
            self.supervisors[name].phase = Phase.ENDED
        else:
            self._life(event).phase = Phase.ENDED

    def _on_supervisor_ready(self, event: Event) -> None:
        self._supervisor(event).phase = Phase.READY

    def _on_supervisor_stopping(self, event: Event) -> None:
        supervisor = self._supervisor(event)
        supervisor.phase, supervisor.reason = Phase.STOPPING, str(event.get("reason", ""))

    def _on_escalated(self, event: Event) -> None:
        self.links.append(event)
        supervisor = self._supervisor(event)
        supervisor.phase, supervisor.reason = Phase.FAILED, str(event.get("reason", ""))

    def _on_host_joined(self, event: Event) -> None:
        self.shm_roots[str(event.get("host", ""))] = str(event.get("shm_root") or self.shm_root)

    def _on_host_lost(self, event: Event) -> None:
        self.links.append(event)

    def _end(self, event: Event) -> Life:
        """Note the end of a process, of which agent and head both tell, in either order."""
        life = self._life(event)
        life.ended_at = life.ended_at or number(event.get("t"))
        life.code = _whole(event.get("code")) if life.code is None else life.code
        life.signal = _whole(event.get("signal")) if life.signal is None else life.signal
        if life.phase in ALIVE:
            life.phase = Phase.EXITED
        return life

    def _life(self, event: Event) -> Life:
        name, incarnation = str(event.get("child", "")), int(number(event.get("incarnation")))
        found = self.life(name, incarnation)
        if found is None:
            found = Life(name=name, incarnation=incarnation, host=self.host)
            lives = self.actors.setdefault(name, [])
            lives.append(found)
            lives.sort(key=lambda life: life.incarnation)
        return found

    def _supervisor(self, event: Event) -> SupervisorLife:
        name = str(event.get("supervisor", ""))
        return self.supervisors.setdefault(name, SupervisorLife(name=name))


def _outline(value: Any) -> Outline | None:
    if not isinstance(value, dict):
        return None
    children = value.get("children")
    if not isinstance(children, list):
        return Outline(name=str(value.get("name", "")))
    below = [outline for child in children if (outline := _outline(child))]
    return Outline(name=str(value.get("name", "")), children=below)


def _whole(value: Any) -> int | None:
    return int(number(value)) if isinstance(value, int) and not isinstance(value, bool) else None
