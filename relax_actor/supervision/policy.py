"""The supervision tree as a pure function: state, event and time in, commands out.

    policy = TreePolicy(spec, random.Random())
    commands = policy.handle(StartAll(), now)

No I/O, no clock, no thread: the shell feeds it facts in the order they happened and obeys the commands in
the order they are listed. Events and commands live in their own modules and are handed on from here.
Refused: one policy a supervisor, each with a mailbox, as in OTP. One object for the whole tree decides a
fault of several levels in one step, and needs no protocol between supervisors that could itself fail.
"""

import random

from relax_actor.supervision.branch import Branch
from relax_actor.supervision.commands import (
    CancelTimer,
    Cause,
    Command,
    Consult,
    Finished,
    GangAbort,
    Kill,
    Promote,
    Regroup,
    Report,
    ReportKind,
    SetTimer,
    Spawn,
    SpawnSpare,
    Stop,
)
from relax_actor.supervision.deadline import StopDeadline
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import (
    AddChild,
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
    KillChild,
    KillRequested,
    LinkAdded,
    Ready,
    Released,
    RemoveChild,
    Scale,
    SpareReady,
    StartAll,
    StopRequested,
    TimerFired,
)
from relax_actor.supervision.failure import Ending, failure_text, own_ending
from relax_actor.supervision.family import BranchSlot
from relax_actor.supervision.news import News
from relax_actor.supervision.node import Node
from relax_actor.supervision.scaling import Replicas, joining, leaving
from relax_actor.supervision.spec import (
    ChildSpec,
    SpecError,
    SupervisorSpec,
    check,
    ids,
    validate,
)
from relax_actor.supervision.status import NodeStatus, status_of

__all__ = [
    "AddChild",
    "AwaitsHost",
    "CancelTimer",
    "Cause",
    "Command",
    "Consult",
    "Decided",
    "Decision",
    "Dying",
    "Event",
    "Exit",
    "ExitKind",
    "Failed",
    "Finished",
    "GangAbort",
    "Gone",
    "HostFound",
    "InitFailed",
    "Kill",
    "KillChild",
    "KillRequested",
    "LinkAdded",
    "NodeStatus",
    "Promote",
    "Ready",
    "Regroup",
    "Released",
    "RemoveChild",
    "Report",
    "ReportKind",
    "Scale",
    "SetTimer",
    "SpareReady",
    "Spawn",
    "SpawnSpare",
    "StartAll",
    "Stop",
    "StopRequested",
    "TimerFired",
    "TreePolicy",
]


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
        slot = self._find_slot(child)[1]
        return Replicas(spec=slot.spec, count=len(slot.nodes), starting=joining(slot), leaving=leaving(slot))

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
                self._change(event)

    def _change(self, event: AddChild | RemoveChild | Scale | KillChild) -> None:
        match event:
            case AddChild():
                self._add(event)
            case Scale():
                branch, slot = self._find_slot(event.child)
                branch.scale(slot, event.replicas)
            case KillChild():
                self._kill_child(event)
            case _:
                self._remove(event.name)

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

    def _add(self, event: AddChild) -> None:
        supervisor = self._find_branch(event.supervisor)
        check(event.spec, event.spec.id or "child", auto_shutdown=supervisor.spec.auto_shutdown)
        _check_new(event.spec, self._taken(supervisor))
        if supervisor.is_closing or not supervisor.is_alive:
            reason = f"`{supervisor.name}` is {'stopping' if supervisor.is_closing else supervisor.state}"
            self._desk.report(
                ReportKind.CHILD_REFUSED, child=event.spec.id, supervisor=supervisor.name, reason=reason
            )
        else:
            supervisor.add(event.spec)

    def _remove(self, name: str) -> None:
        for branch in self._root.branches():
            nodes = branch.find(name)
            if nodes:
                _check_whole(branch, nodes)
                if not branch.is_closing:  # else it goes anyway, when its turn comes
                    branch.remove(nodes)
                return
        raise SpecError(name, "is no child of any supervisor, so it cannot be removed")

    def _kill_child(self, event: KillChild) -> None:
        leaf = next((leaf for leaf in self._root.leaves() if leaf.name == event.name), None)
        if leaf is None:
            raise SpecError(event.name, "is no actor of this tree")
        if not leaf.is_alive:
            raise SpecError(event.name, f"has no process now: it is {leaf.state}")
        leaf.kill(event.reason)

    def _find_slot(self, child: str) -> tuple[Branch, BranchSlot]:
        for branch in self._root.branches():
            if (slot := branch.slot_named(child)) is not None:
                return branch, slot
        raise SpecError(child, "is no child of any supervisor, so it cannot be scaled")

    def _find_branch(self, name: str) -> Branch:
        for branch in self._root.branches():
            if branch.name == name:
                return branch
        raise SpecError(name, "is not a supervisor of this tree")

    def _taken(self, target: Branch) -> set[str]:
        """Return the ids in use, and those another supervisor will use again when it restarts."""
        taken = {self._root.name}
        for branch in self._root.branches():
            present = branch.slot_ids()
            taken.update(present)
            if branch is not target:
                removed = (child for child in branch.spec.children if child.id not in present)
                taken.update(each for child in removed for each in ids(child))
        return taken

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


def _check_whole(branch: Branch, nodes: list[Node]) -> None:
    for slot in branch.slots:
        if slot.gang is not None and 0 < len(set(nodes) & set(slot.nodes)) < len(slot.nodes):
            raise SpecError(nodes[0].name, f"is a rank of a gang; remove `{slot.id}` as a whole")


def _check_new(spec: ChildSpec | SupervisorSpec, taken: set[str]) -> None:
    names = ids(spec)
    for each in names:
        if each in taken or names.count(each) > 1:
            raise SpecError(each, "names two children; an id is used once in a tree")
