"""What the policy tells the shell to do, in the order of the list it returns."""

from enum import StrEnum
from typing import Any, Literal

import msgspec

from relax_actor.supervision.events import Exit
from relax_actor.supervision.spec import ChildSpec


class Spawn(msgspec.Struct, frozen=True, kw_only=True):
    """Start an actor process; answered by Ready, or by InitFailed and Gone, or by Gone alone."""

    name: str
    incarnation: int
    spec: ChildSpec
    replica: int


class SpawnSpare(msgspec.Struct, frozen=True, kw_only=True):
    """Start a process that runs the actor's `__init__` and waits; answered by `SpareReady` or `Gone`."""

    name: str  # `id/SPARE/n`, never used twice; its incarnation is 1
    spec: ChildSpec


class Promote(msgspec.Struct, frozen=True, kw_only=True):
    """Have a waiting spare become this incarnation; answered like a Spawn."""

    spare: str
    name: str
    incarnation: int
    spec: ChildSpec
    replica: int


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Ask an actor to end; the policy itself sends Kill when `shutdown_s` is over. It may be gone already."""

    name: str
    incarnation: int
    shutdown_s: float
    drain_s: float = 0.0  # above 0: it may first finish what it has; another Stop follows if it takes longer


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """SIGKILL an actor and its process group; it may be gone already."""

    name: str
    incarnation: int


class GangAbort(msgspec.Struct, frozen=True, kw_only=True):
    """Have a surviving rank's I/O thread abort its collectives; answered by `Released`."""

    name: str
    incarnation: int
    epoch: int
    reason: str


class Regroup(msgspec.Struct, frozen=True, kw_only=True):
    """Have a rank join the collective group of a new epoch; all ranks are told together."""

    name: str
    incarnation: int
    gang: str  # the child's id
    epoch: int  # from 1, never repeats
    rank: int
    size: int


class Consult(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the `on_failure` hook; answered by `Decided`, once, or not in time."""

    name: str
    incarnation: int
    exit: Exit
    restarts: int
    supervisor: str


class SetTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer with `TimerFired` after `delay_s`, which may be 0; ids are never used twice."""

    timer: str
    delay_s: float


class CancelTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Forget a timer that was set."""

    timer: str


class ReportKind(StrEnum):
    """The events the policy logs; spawns and exits, which have pids, are the shell's to log."""

    CHILD_READY = "child_ready"  # child, incarnation, after_s
    CHILD_RESTARTING = (
        "child_restarting"  # child, incarnation (that failed), delay_s, reason, also (stopped with it)
    )
    CHILD_AWAITS_HOST = "child_awaits_host"  # child, incarnation, host: nowhere else is room
    CHILD_ENDED = "child_ended"  # child, incarnation, reason: and is not restarted
    CHILD_KILLED = "child_killed"  # child, incarnation, reason: over its time to start or to stop
    CHILD_REFUSED = "child_refused"  # child, supervisor, reason: an AddChild that came to nothing
    CHILD_REMOVED = "child_removed"  # child, incarnation: it was to leave, and is gone
    CHILD_SCALED = "child_scaled"  # child, replicas, before, starting, leaving
    SUPERVISOR_READY = "supervisor_ready"  # supervisor
    SUPERVISOR_STOPPING = "supervisor_stopping"  # supervisor, reason: ends, but not by failure
    ESCALATED = "escalated"  # supervisor, reason
    RESTART_BY_SPARE = "restart_by_spare"  # child, incarnation, spare
    SPARE_READY = "spare_ready"  # spare
    SPARE_LOST = "spare_lost"  # spare, reason
    GANG_ABORTED = "gang_aborted"  # gang, epoch, child (that died), survivors, reason
    GANG_FORMED = "gang_formed"  # gang, epoch, ranks
    FAILURE_DECIDED = "failure_decided"  # child, incarnation, decision, detail
    HOOK_LATE = "hook_late"  # child, incarnation, after_s: the policy's own rule is used
    LINKED_KILL = "linked_kill"  # child, incarnation, because
    STOP_OVERDUE = "stop_overdue"  # supervisor, after_s, children: killed
    STALE_EVENT = "stale_event"  # child, incarnation (of the event), current, event: ignored


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Log one event with its fields (JSON types only)."""

    kind: ReportKind
    fields: dict[str, Any]


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One failure: which incarnation ended, how, and when (monotonic seconds)."""

    child: str
    incarnation: int
    exit: Exit
    at_s: float

    def __str__(self) -> str:
        return f"{self.exit}, `{self.child}` incarnation {self.incarnation}"


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The tree is down: nothing runs, nothing will be started. Sent exactly once, last."""

    outcome: Literal["ok", "failed"]
    reason: str
    """One line when ok; when failed what a person reads after `error:`, first failure first."""
    first_cause: Cause | None = None
    killed: tuple[str, ...] = ()
    """The actors that did not stop in time and had to be killed."""


Command = (
    Spawn
    | SpawnSpare
    | Promote
    | Stop
    | Kill
    | GangAbort
    | Regroup
    | Consult
    | SetTimer
    | CancelTimer
    | Report
    | Finished
)
