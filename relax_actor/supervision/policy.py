"""The supervision tree as a pure function: state, event and time in, commands out.

    policy = TreePolicy(spec, random.Random())
    commands = policy.handle(StartAll(), now)

No I/O, no clock, no thread: the shell feeds it facts in the order they happened and obeys the commands in
the order they are listed. Its parts are `news` (which fact concerns whom), `requests` (what is asked of a
running tree) and `branch` (what a supervisor does about it).
Refused: one policy a supervisor, each with a mailbox, as in OTP. One object for the whole tree decides a
fault of several levels in one step, and needs no protocol between supervisors that could itself fail.
"""

import random

from relax_actor.supervision.branch import Branch
from relax_actor.supervision.commands import Command, Finished, ReportKind
from relax_actor.supervision.deadline import StopDeadline
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import (
    AwaitsHost,
    Decided,
    Decision,
    Dying,
    Event,
    Exit,
    ExitKind,
    Failed,
    Gone,
    HostFound,
    InitFailed,
    KillRequested,
    LinkAdded,
    Ready,
    Released,
    SpareReady,
    StartAll,
    StopRequested,
    TimerFired,
)
from relax_actor.supervision.failure import Ending, failure_text, own_ending
from relax_actor.supervision.news import News
from relax_actor.supervision.node import Node
from relax_actor.supervision.requests import Requests
from relax_actor.supervision.scaling import Replicas
from relax_actor.supervision.spec import SupervisorSpec
from relax_actor.supervision.spec_checks import validate
from relax_actor.supervision.status import NodeStatus, status_of


class TreePolicy:
    """What a whole supervision tree does about each event.

    Args:
        spec: the root supervisor; its restart type is not used.
        rng: the jitter of back-offs, and nothing else.
        consult_s: how long `on_failure` may take to decide; None: nobody is asked.
        stop_total_s: how long the tree may take to come down; None: as long as its children may.

    Raises:
        SpecError: the tree cannot be run.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        rng: random.Random,
        *,
        consult_s: float | None = None,
        stop_total_s: float | None = None,
    ) -> None:
        validate(spec)
        self._desk = Desk(rng, consult_s)
        self._top = _Top()
        self._root = Branch(spec, self._top, self._desk)
        self._news = News(self._root, self._desk)
        self._requests = Requests(self._root, self._desk)
        self._deadline = StopDeadline(self._root, self._desk, stop_total_s)
        self._stop_reason = ""
        self._is_finished = False

    @property
    def root_id(self) -> str:
        """The id of the root supervisor."""
        return self._root.name

    @property
    def is_finished(self) -> bool:
        """Whether `Finished` was sent; every later event is ignored."""
        return self._is_finished

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event and decide.

        Args:
            event: a fact or a wish.
            now: monotonic seconds; never less than before.

        Returns:
            What to do, in order.

        Raises:
            SpecError: an AddChild, RemoveChild, Scale, KillChild or LinkAdded that makes no sense; nothing is
                changed.
        """
        if self._is_finished:
            return []
        self._desk.now = now
        self._dispatch(event)
        self._desk.settle()
        self._deadline.watch()
        if self._top.ending is not None:
            self._finish(self._top.ending)
        return self._desk.take_commands()

    def replicas(self, child: str) -> Replicas:
        """Return how many replicas a child has, and which of them come or go.

        Raises:
            SpecError: there is no such child.
        """
        return self._requests.replicas(child)

    def snapshot(self) -> NodeStatus:
        """Return where every supervisor and actor is now."""
        return status_of(self._root)

    def _dispatch(self, event: Event) -> None:
        match event:
            case StartAll():
                self._start()
            case Ready() | InitFailed() | Gone() | Dying() | Failed() | Released() | Decided():
                self._news.tell(event)
            case AwaitsHost() | HostFound():
                self._news.tell(event)
            case SpareReady():
                self._news.tell_spare(event)
            case LinkAdded():
                self._news.link(event)
            case TimerFired():
                self._desk.fire(event.timer)
            case StopRequested():
                self._stop(event.reason)
            case KillRequested():
                self._kill(event.reason)
            case _:
                self._requests.grant(event)

    def _start(self) -> None:
        if self._root.incarnation == 0:
            self._root.start()

    def _stop(self, reason: str) -> None:
        if self._root.is_closing:
            return
        self._stop_reason = reason
        self._desk.report(ReportKind.SUPERVISOR_STOPPING, supervisor=self._root.name, reason=reason)
        if self._root.is_alive:
            self._root.stop()
        else:  # nothing was started
            self._top.ending = own_ending(self._root.name, 0, Exit(kind=ExitKind.STOPPED), self._desk.now)

    def _kill(self, reason: str) -> None:
        for leaf in reversed(list(self._root.leaves())):
            if leaf.is_alive:
                leaf.kill()
        self._stop(reason)

    def _finish(self, ending: Ending) -> None:
        self._is_finished = True
        killed = tuple(self._desk.killed)
        match ending.exit.kind:
            case ExitKind.STOPPED:
                finished = Finished(outcome="ok", reason=self._stop_reason, killed=killed)
            case ExitKind.NORMAL:
                finished = Finished(outcome="ok", reason=ending.exit.detail, killed=killed)
            case _:
                finished = Finished(
                    outcome="failed", reason=failure_text(ending), first_cause=ending.first, killed=killed
                )
        self._desk.commands.append(finished)


class _Top:
    """The parent of the root: it restarts nobody and remembers how the root ended."""

    is_closing = False

    def __init__(self) -> None:
        self.ending: Ending | None = None

    def wake(self) -> None:
        """Do nothing: nobody waits for the root to be ready."""

    def child_down(self, child: Node, ending: Ending) -> None:  # noqa: ARG002 - there is one root
        self.ending = ending

    def decided(self, child: Node, ending: Ending, decision: Decision | None, detail: str) -> None:
        """Do nothing: nobody is asked about the root."""
