"""What the shell tells the policy: one record a fact, and how an actor ended in words a person can use."""

from enum import StrEnum
from signal import Signals

import msgspec

from relax_actor.supervision.spec import ChildSpec, SupervisorSpec


class ExitKind(StrEnum):
    """Why an actor is gone, as far as its supervisor cares."""

    NORMAL = "normal"  # finished its work
    STOPPED = "stopped"  # ended because it was told to
    ERROR = "error"  # an exception nobody caught, or an exit code other than 0
    SIGNAL = "signal"
    OOM = "oom"  # the kernel took it for want of memory
    HANG = "hang"  # no progress; killed for it
    START_TIMEOUT = "start_timeout"  # not ready in time; killed for it
    DEVICE_LOST = "device_lost"  # its GPU is gone or poisoned
    LEASE = "lease"  # its host no longer answers


class Decision(StrEnum):
    """What an `on_failure` hook may say; None leaves it to the policy's own rules."""

    RESTART = "restart"  # whatever its restart type says; intensity and back-off hold
    IGNORE = "ignore"  # leave it down
    ESCALATE = "escalate"  # fail its supervisor


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How one incarnation ended; `str()` of it is what a person reads."""

    kind: ExitKind
    code: int | None = None
    signal: int | None = None
    detail: str = ""

    @property
    def is_normal(self) -> bool:
        """Whether nothing went wrong: it finished, or did as it was told."""
        return self.kind in {ExitKind.NORMAL, ExitKind.STOPPED}

    def __str__(self) -> str:
        return f"{self._head()}: {self.detail}" if self.detail else self._head()

    def _head(self) -> str:
        match self.kind:
            case ExitKind.SIGNAL if self.signal is not None:
                return signal_name(self.signal)
            case ExitKind.ERROR if self.code is not None:
                return f"exit code {self.code}"
            case _:
                return _HEADS[self.kind]


class StartAll(msgspec.Struct, frozen=True, kw_only=True):
    """Start the tree; once."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's `__init__` returned and it takes messages."""

    name: str
    incarnation: int


class InitFailed(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's `__init__` raised; its `Gone` follows."""

    name: str
    incarnation: int
    error: str
    """`Type: message`, equal for equal errors: no addresses, pids or times."""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel says that an incarnation is over, once each, and nothing of it is left."""

    name: str
    incarnation: int
    exit: Exit


class Dying(msgspec.Struct, frozen=True, kw_only=True):
    """An actor runs no code any more, but is not gone yet; `Gone` follows."""

    name: str
    incarnation: int


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody saw that an actor cannot go on, such as a node agent a hang: it is to be killed for it."""

    name: str
    incarnation: int
    exit: Exit


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's main thread has left the collectives of an aborted epoch."""

    name: str
    incarnation: int
    epoch: int


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The `on_failure` hook answered a `Consult`."""

    name: str
    incarnation: int
    decision: Decision | None
    detail: str = ""
    """What the hook raised, where that is why it escalates."""


class AwaitsHost(msgspec.Struct, frozen=True, kw_only=True):
    """An actor is to be started on a host that is away, and nowhere else is room: its start has to wait."""

    name: str
    incarnation: int
    host: str


class HostFound(msgspec.Struct, frozen=True, kw_only=True):
    """The host that an actor waited for is there: its start begins now."""

    name: str
    incarnation: int


class SpareReady(msgspec.Struct, frozen=True, kw_only=True):
    """A spare's `__init__` returned: it waits for a name."""

    name: str


class LinkAdded(msgspec.Struct, frozen=True, kw_only=True):
    """From now on two actors share their fate: the failure of one kills the other."""

    a: str
    b: str


class TimerFired(msgspec.Struct, frozen=True, kw_only=True):
    """A timer asked for by `SetTimer` ran out; a cancelled one that fires late does no harm."""

    timer: str


class StopRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Stop the tree in order, each child within its `shutdown_s`."""

    reason: str


class KillRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Stop the tree now: kill every actor at once."""

    reason: str


class AddChild(msgspec.Struct, frozen=True, kw_only=True):
    """Append a child to a supervisor and start it; forgotten when the supervisor itself restarts."""

    supervisor: str
    spec: ChildSpec | SupervisorSpec


class RemoveChild(msgspec.Struct, frozen=True, kw_only=True):
    """Stop and forget an actor (`rollout/3`), all replicas of a child (`rollout`), or a supervisor."""

    name: str


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Have an elastic child have so many replicas: new ones start, those with the highest numbers drain."""

    child: str
    replicas: int


class KillChild(msgspec.Struct, frozen=True, kw_only=True):
    """Kill one actor now; what follows is what follows from any failure of it."""

    name: str
    reason: str


LeafEvent = Ready | InitFailed | Gone | Dying | Failed | Released | Decided | AwaitsHost | HostFound
"""What concerns one incarnation of one actor."""

Event = (
    StartAll
    | LeafEvent
    | SpareReady
    | LinkAdded
    | TimerFired
    | StopRequested
    | KillRequested
    | AddChild
    | RemoveChild
    | Scale
    | KillChild
)

_HEADS = {
    ExitKind.NORMAL: "ended normally",
    ExitKind.STOPPED: "stopped",
    ExitKind.ERROR: "error",
    ExitKind.SIGNAL: "killed by a signal",
    ExitKind.OOM: "out of memory",
    ExitKind.HANG: "hung",
    ExitKind.START_TIMEOUT: "start timeout",
    ExitKind.DEVICE_LOST: "device lost",
    ExitKind.LEASE: "host lost",
}


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return Signals(number).name
    except ValueError:  # real-time signals have numbers only
        return f"signal {number}"
