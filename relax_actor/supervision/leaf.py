"""A child that is one actor process: from its spawn to the kernel's word that it is gone."""

from relax_actor.supervision.commands import Kill, ReportKind, Spawn, Stop
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import Exit, ExitKind
from relax_actor.supervision.failure import own_ending
from relax_actor.supervision.node import Node, Parent
from relax_actor.supervision.spec import ChildSpec
from relax_actor.supervision.states import ChildState, Trigger


class Leaf(Node):
    """One replica of a child spec."""

    def __init__(self, name: str, replica: int, spec: ChildSpec, parent: Parent, desk: Desk) -> None:
        super().__init__(name, spec, parent, desk)
        self._spec, self._replica = spec, replica
        self._failure: Exit | None = None  # why it was given up before it was gone
        self._raised = ""  # what its __init__ said
        self._is_killed = False
        self._started_at_s = 0.0

    def start(self) -> None:
        """Spawn the next incarnation and give it `start_timeout_s` to be ready."""
        incarnation = self._begin()
        self._failure, self._raised, self._is_killed = None, "", False
        self._started_at_s = self._desk.now
        self._desk.commands.append(
            Spawn(name=self.name, incarnation=incarnation, spec=self._spec, replica=self._replica)
        )
        self._set_timer("start", self._spec.start_timeout_s)

    def stop(self) -> None:
        """Ask it to end within `shutdown_s`, unless it is already on its way."""
        if self.state is not ChildState.STOPPING:
            self._stop_by(Trigger.STOP)

    def kill(self) -> None:
        """Kill it now, whatever it is doing."""
        if self.state is not ChildState.STOPPING:
            self._move(Trigger.STOP)
        if not self._is_killed:
            self._cancel_timer()
            self._kill("asked to kill")

    def ready(self) -> None:
        """Note that it takes messages; too late when it is already being stopped."""
        if self.state is ChildState.STARTING:
            self._cancel_timer()
            self._become_ready()
            self._desk.report(
                ReportKind.CHILD_READY,
                child=self.name,
                incarnation=self.incarnation,
                after_s=self._desk.now - self._started_at_s,
            )

    def init_failed(self, error: str) -> None:
        """Note what its `__init__` raised, and see to it that it goes."""
        if self.state is ChildState.STARTING:
            self._raised = error
            self._stop_by(Trigger.GIVE_UP)

    def gone(self, exit_: Exit) -> None:
        """Note that it is over, and let its supervisor decide."""
        self._cancel_timer()
        seen = self._explain(exit_)
        ending = own_ending(self.name, self.incarnation, seen, self._desk.now, init_error=self._raised)
        self._become_down(ending)

    def timer_fired(self) -> None:
        """End the back-off, or kill what is over its time."""
        match self.state:
            case ChildState.STARTING:
                self._timer = ""
                self._failure = Exit(kind=ExitKind.START_TIMEOUT, detail=self._patience())
                self._move(Trigger.GIVE_UP)
                self._kill(self._patience())
            case ChildState.STOPPING:
                self._timer = ""
                self._kill(f"not gone within {self._spec.shutdown_s:g} s")
            case _:
                super().timer_fired()

    def _stop_by(self, trigger: Trigger) -> None:
        self._cancel_timer()
        self._move(trigger)
        if self._spec.shutdown_s == 0:
            self._kill("shutdown_s is 0")
            return
        self._desk.commands.append(
            Stop(name=self.name, incarnation=self.incarnation, shutdown_s=self._spec.shutdown_s)
        )
        self._set_timer("stop", self._spec.shutdown_s)

    def _kill(self, reason: str) -> None:
        self._is_killed = True
        self._desk.commands.append(Kill(name=self.name, incarnation=self.incarnation))
        self._desk.report(
            ReportKind.CHILD_KILLED, child=self.name, incarnation=self.incarnation, reason=reason
        )

    def _patience(self) -> str:
        return f"not ready within {self._spec.start_timeout_s:g} s"

    def _explain(self, exit_: Exit) -> Exit:
        """Return the exit with what is known of it beyond the kernel's word."""
        if self._failure is not None:
            return self._failure
        if self._raised:
            return Exit(kind=ExitKind.ERROR, code=exit_.code, detail=self._raised)
        if self.state is ChildState.STARTING and exit_.is_normal:
            return Exit(kind=ExitKind.ERROR, code=exit_.code, detail="ended before it was ready")
        return exit_
