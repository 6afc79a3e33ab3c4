"""What an actor and a supervisor have in common as children: a state, a restart type and a back-off."""

from abc import ABC, abstractmethod
from typing import Protocol

from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import Decision, Exit
from relax_actor.supervision.failure import Ending
from relax_actor.supervision.spec import Backoff, ChildSpec, RestartType, SupervisorSpec
from relax_actor.supervision.states import ALIVE, ChildState, Trigger, move


class Parent(Protocol):
    """Whom a child tells what became of it."""

    @property
    def is_closing(self) -> bool:
        """Whether it, or anyone above it, is on the way down: nothing is started any more."""
        ...

    def wake(self) -> None:
        """Have it decide before the event is done with: a child is ready, or may be started again."""
        ...

    def child_down(self, child: "Node", ending: Ending) -> None:
        """Decide what follows from a child's end."""
        ...

    def decided(self, child: "Node", ending: Ending, decision: Decision | None, detail: str) -> None:
        """Do with a failed child as `on_failure` said."""
        ...


class Node(ABC):
    """A child of a supervisor, or the root.

    Args:
        name: the actor's name or the supervisor's id.
        spec: how it is run.
        parent: whom it tells.
        desk: what the whole tree shares.
    """

    def __init__(self, name: str, spec: ChildSpec | SupervisorSpec, parent: Parent, desk: Desk) -> None:
        self.name = name
        self.restart, self.significant = spec.restart, spec.significant
        self.state = ChildState.DOWN
        self.last_exit: Exit | None = None
        self.was_ready = False  # since its supervisor started
        self.is_doomed = False  # to be stopped when its turn comes, whatever it does meanwhile
        self.is_leaving = False  # to be forgotten once it is down
        self.is_joining = False  # added to replicas that run: until it was ready its failure is nobody else's
        self._backoff = spec.backoff if isinstance(spec, ChildSpec) else None
        self._parent, self._desk = parent, desk
        self._failures = 0  # in a row
        self._ready_at_s: float | None = None  # None until this incarnation is ready
        self._init_error = ""  # of the last start, if that raised
        self._timer = ""  # the one that is running, if any

    @property
    def incarnation(self) -> int:
        """How often this name has been started."""
        return self._desk.incarnations.get(self.name, 0)

    @property
    def is_alive(self) -> bool:
        """Whether there is something to stop and to wait for."""
        return self.state in ALIVE

    @abstractmethod
    def start(self) -> None:
        """Begin to start; `child_ready` or `child_down` follows."""

    @abstractmethod
    def stop(self) -> None:
        """Begin to stop if it runs; `child_down` follows."""

    def doom(self) -> None:
        """Have it stopped when its turn comes; a pending restart is called off at once."""
        self.is_doomed = self.is_alive
        if self.state in {ChildState.BACKING_OFF, ChildState.AWAITING}:
            self._cancel_timer()
            self._move(Trigger.STOP)

    def back_off(self, default: Backoff, *, at_once: bool = False) -> float:
        """Wait before the next start, by its own back-off or the default; return for how long, in seconds."""
        self._failures = 0 if self.was_stable(default) else self._failures + 1
        delay_s = 0.0 if at_once else (self._backoff or default).delay(self._failures, self._desk.rng)
        self._move(Trigger.BACK_OFF)
        self._set_timer("backoff", delay_s)
        return delay_s

    def was_stable(self, default: Backoff) -> bool:
        """Return whether the incarnation that ended had been ready for long."""
        reset_after_s = (self._backoff or default).reset_after_s
        return self._ready_at_s is not None and self._desk.now - self._ready_at_s >= reset_after_s

    def end(self) -> None:
        """Stay down: it is over by itself and is not restarted."""
        self._move(Trigger.END)

    def reset(self) -> None:
        """Be started again with the others although it had ended."""
        if self.state is ChildState.ENDED:
            self._move(Trigger.RESET)

    def restarts_after(self, ending: Ending) -> bool:
        """Return whether its restart type starts it again after such an end."""
        if self.restart == RestartType.TRANSIENT:
            return not ending.exit.is_normal
        return self.restart == RestartType.PERMANENT

    def repeats(self, ending: Ending) -> bool:
        """Remember what `__init__` raised; return whether the start before raised the same."""
        is_repeated = bool(ending.init_error) and ending.init_error == self._init_error
        self._init_error = ending.init_error
        return is_repeated

    def timer_fired(self) -> None:
        """End the back-off, the one thing that every kind of child waits for."""
        self._timer = ""
        self._move(Trigger.DELAY_OVER)
        self._parent.wake()

    def _begin(self) -> int:
        self._move(Trigger.START)
        self._ready_at_s = None
        return self._desk.next_incarnation(self.name)

    def _become_ready(self) -> None:
        self._move(Trigger.READY)
        self.was_ready = True
        self._ready_at_s = self._desk.now
        self._init_error = ""
        self._parent.wake()

    def _become_down(self, ending: Ending) -> None:
        self._move(Trigger.GONE)
        self.last_exit = ending.exit
        self._parent.child_down(self, ending)

    def _move(self, trigger: Trigger) -> None:
        self.state = move(self.state, trigger)

    def _set_timer(self, purpose: str, delay_s: float) -> None:
        self._timer = f"{self.name}#{self.incarnation}:{purpose}"
        self._desk.set_timer(self._timer, delay_s, self)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._desk.cancel_timer(self._timer)
            self._timer = ""
