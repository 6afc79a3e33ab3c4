"""A child that is one actor process: from its spawn to the kernel's word that it is gone."""

from relax_actor.supervision.commands import Consult, GangAbort, Kill, Regroup, ReportKind, Spawn, Stop
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import Decision, Exit, ExitKind
from relax_actor.supervision.failure import Ending, own_ending
from relax_actor.supervision.node import Node, Parent
from relax_actor.supervision.spares import SparePool
from relax_actor.supervision.spec import ChildSpec, RestartType
from relax_actor.supervision.states import ChildState, Trigger


class Leaf(Node):
    """One replica of a child spec.

    Args:
        name: whose incarnations it starts.
        replica: which of the spec's replicas it is, from 0.
        spec: how it is run.
        parent: its supervisor.
        desk: what the whole tree shares.
        pool: the spares that may take over.
    """

    def __init__(
        self,
        name: str,
        replica: int,
        spec: ChildSpec,
        parent: Parent,
        desk: Desk,
        *,
        pool: SparePool | None = None,
    ) -> None:
        super().__init__(name, spec, parent, desk)
        self._spec, self._replica, self._pool = spec, replica, pool
        self._aborting = 0  # the epoch whose collectives it has not left yet
        self._ending: Ending | None = None  # what `on_failure` is being asked about
        self.is_aborted = False  # its group broke, and it is in no other yet
        self._is_dying = False  # it runs no code any more, but is not gone
        self.is_linked_end = False  # an actor linked to it failed, so it is killed
        self._failure: Exit | None = None  # why it was given up before it was gone
        self._raised = ""  # what its __init__ said
        self.is_killed = False
        self._is_draining = False  # it was told to leave, and may still finish what it has
        self._started_at_s = 0.0

    def start(self) -> None:
        """Spawn the next incarnation and give it `start_timeout_s` to be ready."""
        incarnation = self._begin()
        self._failure, self._raised, self.is_killed = None, "", False
        self._aborting, self.is_aborted, self.is_linked_end = 0, False, False
        self._is_dying = self._is_draining = False
        self._started_at_s = self._desk.now
        if self._pool is None or not self._pool.take(self.name, incarnation, self._replica):
            self._desk.commands.append(
                Spawn(name=self.name, incarnation=incarnation, spec=self._spec, replica=self._replica)
            )
        self._set_timer("start", self._spec.start_timeout_s)

    def stop(self) -> None:
        """Ask it to end within `shutdown_s`, unless it is already on its way."""
        if self.state is not ChildState.STOPPING:
            self._stop_by(Trigger.STOP)
        elif self._is_draining:
            self._end_drain()

    def drain(self, drain_s: float) -> None:
        """Let it finish what it has and end; after `drain_s` it is asked to end as by `stop`."""
        if self.state is not ChildState.READY or drain_s == 0:
            self.stop()
            return
        self._is_draining = True
        self._cancel_timer()
        self._move(Trigger.STOP)
        self._say_stop(drain_s)
        self._set_timer("drain", drain_s)

    def respec(self, spec: ChildSpec) -> None:
        """Have later incarnations start by another spec."""
        self._spec = spec

    def kill(self, reason: str = "asked to kill") -> None:
        """Kill it now, whatever it is doing."""
        if self.state is not ChildState.STOPPING:
            self._move(Trigger.STOP)
        if not self.is_killed:
            self._cancel_timer()
            self._kill(reason)

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

    def await_host(self, host: str) -> None:
        """Let no time to start run out while there is nowhere to start."""
        if self.state is ChildState.STARTING:
            self._cancel_timer()
            self._desk.report(
                ReportKind.CHILD_AWAITS_HOST, child=self.name, incarnation=self.incarnation, host=host
            )

    def host_found(self) -> None:
        """Give it `start_timeout_s` from now on."""
        if self.state is ChildState.STARTING:
            self._cancel_timer()
            self._started_at_s = self._desk.now
            self._set_timer("start", self._spec.start_timeout_s)

    def init_failed(self, error: str) -> None:
        """Note what its `__init__` raised, and see to it that it goes."""
        if self.state is ChildState.STARTING:
            self._raised = error
            self._stop_by(Trigger.GIVE_UP)

    def fail(self, exit_: Exit) -> None:
        """Kill it for a failure that somebody else saw, unless it is on its way out already."""
        if self.state in {ChildState.STARTING, ChildState.READY}:
            self._cancel_timer()
            self._failure = exit_
            self._move(Trigger.GIVE_UP)
            self._kill(str(exit_))

    def fail_with(self, other: str, exit_: Exit) -> bool:
        """Kill it because an actor linked to it failed; return whether there was anything to kill."""
        was_running = self.state in {ChildState.STARTING, ChildState.READY}
        self.is_linked_end = was_running
        self.fail(Exit(kind=ExitKind.ERROR, detail=f"linked to `{other}`, which failed: {exit_}"))
        return was_running

    def is_failure(self, exit_: Exit) -> bool:
        """Return whether such an end is a failure of its own, not one that a link or its gang brought."""
        return not self.is_linked_end and not self.is_aborted and not self._explain(exit_).is_normal

    @property
    def is_free(self) -> bool:
        """Whether it can join a collective group."""
        return self.state is ChildState.READY and not self._aborting and not self._is_dying

    def dying(self) -> bool:
        """Note that it runs no code any more; return whether that breaks its gang before it is gone."""
        is_news = self.is_free and not self.is_aborted
        self._is_dying = True
        is_to_end = self.is_doomed or self.is_leaving
        return is_news and not is_to_end and self.restart == RestartType.PERMANENT

    def abort(self, epoch: int, reason: str) -> None:
        """Get it out of its collectives within `abort_grace_s`."""
        self._aborting, self.is_aborted = epoch, True
        self._desk.commands.append(
            GangAbort(name=self.name, incarnation=self.incarnation, epoch=epoch, reason=reason)
        )
        self._set_timer(f"abort{epoch}", self._spec.abort_grace_s)

    def released(self, epoch: int) -> None:
        """Note that it has left them."""
        if self.state is ChildState.READY and self._aborting == epoch:
            self._aborting = 0
            self._cancel_timer()
            self._parent.wake()

    def regroup(self, gang: str, epoch: int, size: int) -> None:
        """Have it join a new group."""
        self.is_aborted = False
        self._desk.commands.append(
            Regroup(
                name=self.name,
                incarnation=self.incarnation,
                gang=gang,
                epoch=epoch,
                rank=self._replica,
                size=size,
            )
        )

    def ask(self, ending: Ending, supervisor: str, within_s: float) -> None:
        """Let `on_failure` decide what to do about its end."""
        self._ending = ending
        self._move(Trigger.ASK)
        self._desk.commands.append(
            Consult(
                name=self.name,
                incarnation=self.incarnation,
                exit=ending.exit,
                restarts=self.incarnation - 1,
                supervisor=supervisor,
            )
        )
        self._set_timer("ask", within_s)

    def decided(self, decision: Decision | None, detail: str) -> None:
        """Do as `on_failure` says, unless it is too late to say anything."""
        if self.state is ChildState.AWAITING and self._ending is not None:
            self._cancel_timer()
            self._move(Trigger.DECIDED)
            self._parent.decided(self, self._ending, decision, detail)

    def gone(self, exit_: Exit) -> None:
        """Note that it is over, and let its supervisor decide."""
        self._cancel_timer()
        seen = self._explain(exit_)
        ending = own_ending(self.name, self.incarnation, seen, self._desk.now, init_error=self._raised)
        self._become_down(ending)

    def timer_fired(self) -> None:
        """End the back-off, kill what is over its time, or decide without `on_failure`."""
        match self.state:
            case ChildState.STARTING:
                self._timer = ""
                self._failure = Exit(kind=ExitKind.START_TIMEOUT, detail=self._patience())
                self._move(Trigger.GIVE_UP)
                self._kill(self._patience())
            case ChildState.STOPPING if self._is_draining:
                self._timer = ""
                self._end_drain()
            case ChildState.STOPPING:
                self._timer = ""
                self._desk.killed.append(f"{self.name}#{self.incarnation}")
                self._kill(f"not gone within {self._spec.shutdown_s:g} s")
            case ChildState.READY:
                self._timer = ""
                late = f"did not leave an aborted collective within {self._spec.abort_grace_s:g} s"
                self.fail(Exit(kind=ExitKind.HANG, detail=late))
            case ChildState.AWAITING:
                self._timer = ""
                late_s = self._desk.consult_s
                self._desk.report(
                    ReportKind.HOOK_LATE, child=self.name, incarnation=self.incarnation, after_s=late_s
                )
                self.decided(None, "")
            case _:
                super().timer_fired()

    def _stop_by(self, trigger: Trigger) -> None:
        self._cancel_timer()
        self._move(trigger)
        if self._spec.shutdown_s == 0:
            self._kill("shutdown_s is 0")
            return
        self._say_stop()
        self._set_timer("stop", self._spec.shutdown_s)

    def _end_drain(self) -> None:
        self._is_draining = False
        self._cancel_timer()
        if self._spec.shutdown_s == 0:
            self._kill("shutdown_s is 0")
            return
        self._say_stop()
        self._set_timer("stop", self._spec.shutdown_s)

    def _say_stop(self, drain_s: float = 0.0) -> None:
        self._desk.commands.append(
            Stop(
                name=self.name,
                incarnation=self.incarnation,
                shutdown_s=self._spec.shutdown_s,
                drain_s=drain_s,
            )
        )

    def _kill(self, reason: str) -> None:
        self.is_killed = True
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
