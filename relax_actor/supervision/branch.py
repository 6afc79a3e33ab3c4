"""A child that is a supervisor: it starts in order, stops in reverse, and decides what a failure costs.

The invariant behind every decision: `advance` looks at where the children are, never at how they got
there, and takes the steps that are possible now. First what is doomed comes down, the last slot first; only
when nothing doomed is left is anything started, the first slot first. So a stop overtakes a restart in
every interleaving, and there is no half-done plan to lose when another failure arrives.
"""

from collections.abc import Iterable, Iterator

from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import Decision, Exit, ExitKind
from relax_actor.supervision.failure import Ending, Window, own_ending
from relax_actor.supervision.family import BranchSlot, Family, place_of
from relax_actor.supervision.leaf import Leaf
from relax_actor.supervision.node import Node, Parent
from relax_actor.supervision.scaling import scale
from relax_actor.supervision.slot import Slot
from relax_actor.supervision.spares import SparePool
from relax_actor.supervision.spec import ChildSpec, RestartType, Strategy, SupervisorSpec
from relax_actor.supervision.states import ChildState, Trigger


class Branch(Family):
    """One supervisor of the tree."""

    def __init__(self, spec: SupervisorSpec, parent: Parent, desk: Desk) -> None:
        super().__init__(spec.id, spec, parent, desk)
        self.spec = spec
        self._window = Window(spec.intensity)
        self.pools: list[SparePool] = []
        self._ending: Ending | None = None  # why it stops, where it was not told to
        self.slots = self._build()

    @property
    def is_closing(self) -> bool:
        """Whether it is on the way down, or will be when its turn comes."""
        is_over = self.state is ChildState.STOPPING or self.is_doomed or self.is_leaving
        return is_over or self._parent.is_closing

    def branches(self) -> Iterator["Branch"]:
        """Return this supervisor and all those below it, top down."""
        yield self
        yield from self.branches_below()

    def start(self) -> None:
        """Begin like new: the children of the spec, no restarts counted."""
        self._begin()
        self.pools = []
        self.slots = self._build()
        self._window, self._ending = Window(self.spec.intensity), None
        self.wake()

    def stop(self) -> None:
        """Begin to stop the children in reverse, unless that is already under way."""
        if self.state is not ChildState.STOPPING:
            self._come_down()

    def add(self, spec: ChildSpec | SupervisorSpec) -> None:
        """Append a child, which starts as soon as its turn has come."""
        self.slots.append(self._make_slot(spec, is_joining=True))
        self.wake()

    def remove(self, nodes: Iterable[Node], *, drain_s: float = 0.0) -> None:
        """Stop children and forget them; actors may first finish what they have, for so long."""
        for node in nodes:
            node.doom()
            node.is_doomed, node.is_leaving = False, True
            if not node.is_alive:
                self._forget(node)
            elif isinstance(node, Leaf):
                node.drain(drain_s)
            else:
                node.stop()
        self.wake()

    def scale(self, slot: BranchSlot, replicas: int) -> None:
        """Have a child have so many replicas, from now on and whenever this supervisor starts again.

        Raises:
            SpecError: it cannot have them, or has not yet those it was to have before.
        """
        self.spec = scale(self, slot, replicas, self._desk)

    def wake(self) -> None:
        """Decide before the event is done with."""
        self._desk.mark(self)

    def child_down(self, child: Node, ending: Ending) -> None:
        """Decide what follows from a child's end; one that was to stop has no consequences."""
        self.wake()
        is_expected = self._is_expected(child)
        child.is_doomed = False
        if is_expected:
            self._disband(child)
            self._let_go(child)
            return
        if isinstance(child, Leaf) and (not ending.exit.is_normal or child.restarts_after(ending)):
            self.dying(child, str(ending.exit))
        if isinstance(child, Leaf) and not ending.exit.is_normal and self._desk.consult_s is not None:
            child.ask(ending, self.name, self._desk.consult_s)
        else:
            self._follow_rules(child, ending)

    def dying(self, child: Leaf, reason: str) -> None:
        """Have the other ranks of its gang leave their collectives."""
        slot = self.slot_of(child)
        if slot.gang is not None and not self.is_closing:
            slot.gang.abort(_ranks(slot), child, reason)

    def decided(self, child: Node, ending: Ending, decision: Decision | None, detail: str) -> None:
        """Do with a failed child as `on_failure` said; without an answer, by the rules."""
        self.wake()
        if decision is not None:
            self._desk.report(
                ReportKind.FAILURE_DECIDED,
                child=child.name,
                incarnation=child.incarnation,
                decision=decision.value,
                detail=detail,
            )
        match decision:
            case Decision.RESTART:
                self._restart(child, ending, is_ordered=True)
            case Decision.IGNORE:
                self._end(child, ending, is_ordered=True)
            case Decision.ESCALATE:
                why = f" ({detail})" if detail else ""
                self._fail(f"`{child.name}` failed and on_failure escalates{why}", ending)
            case _:
                self._follow_rules(child, ending)

    def advance(self) -> None:
        """Take every step that is possible now."""
        if self._sweep_down() or not self.is_alive:
            return
        if self.state is ChildState.STOPPING:
            if all(pool.is_empty for pool in self.pools):
                self._become_down(self._ending or self._told_to_stop())
        elif not self.is_closing:
            self._sweep_up()

    def _sweep_down(self) -> bool:
        """Stop the last slot that has doomed children; return whether there was one."""
        for slot in reversed(self.slots):
            doomed = [node for node in slot.nodes if node.is_doomed]
            for node in doomed:
                node.stop()
            if doomed:
                return True
        return False

    def _sweep_up(self) -> None:
        """Start what may start; in order, except that one_for_one restarts its children independently."""
        in_step = self.spec.strategy is not Strategy.ONE_FOR_ONE
        if in_step and any(node.state is ChildState.BACKING_OFF for node in self.nodes):
            return  # those that are restarted together wait together
        for slot in self.slots:
            self._start_slot(slot)
            if slot.gang is not None:
                slot.gang.form(_ranks(slot))
            if not slot.is_settled and (in_step or self.state is ChildState.STARTING):
                return
        if self.state is ChildState.STARTING:
            self._become_ready()
            self._desk.report(ReportKind.SUPERVISOR_READY, supervisor=self.name)
        for slot in self.slots:
            if slot.pool is not None and slot.is_settled:  # a spare must not delay who is needed now
                slot.pool.fill()

    def _start_slot(self, slot: BranchSlot) -> None:
        for node in slot.nodes:
            if node.state is ChildState.DOWN:
                node.start()
        slot.is_joining = slot.is_joining and not slot.is_settled

    def _is_expected(self, child: Node) -> bool:
        """Return whether an end has no consequences: it was to stop, or broke with its gang."""
        is_collateral = isinstance(child, Leaf) and child.is_aborted
        return self.is_closing or child.is_doomed or child.is_leaving or is_collateral

    def _disband(self, child: Node) -> None:
        gang = self.slot_of(child).gang
        if gang is not None:
            gang.disband()

    def _follow_rules(self, child: Node, ending: Ending) -> None:
        slot = self.slot_of(child)
        if (slot.is_joining or child.is_joining) and not child.was_ready:
            self._refuse(slot, child, ending)
        elif self.state is ChildState.STARTING and not child.was_ready:
            self._fail(f"`{child.name}` did not start", ending)
        elif child.restarts_after(ending):
            self._restart(child, ending)
        else:
            self._end(child, ending)

    def _let_go(self, child: Node) -> None:
        if child.is_leaving or child.restart is RestartType.TEMPORARY:
            self._forget(child)

    def _refuse(self, slot: BranchSlot, child: Node, ending: Ending) -> None:
        reason = f"`{child.name}` did not start: {ending.exit}"
        name, refused = (child.name, [child]) if child.is_joining else (slot.id, list(slot.nodes))
        self._desk.report(ReportKind.CHILD_REFUSED, child=name, supervisor=self.name, reason=reason)
        self.remove(refused)

    def _restart(self, child: Node, ending: Ending, *, is_ordered: bool = False) -> None:
        self._window.add(child.name, ending.first, self._desk.now)
        slot = self.slot_of(child)
        refusal = slot.streak.refusal(child, ending, was_stable=child.was_stable(self.spec.backoff))
        if refusal and not is_ordered:
            self._fail(refusal, ending)
        elif self._window.is_exceeded:
            self._fail(self._window.describe(), ending)
        else:
            has_spare = slot.pool is not None and slot.pool.has_ready
            delay_s = child.back_off(self.spec.backoff, at_once=has_spare)
            self._desk.report(
                ReportKind.CHILD_RESTARTING,
                child=child.name,
                incarnation=child.incarnation,
                delay_s=delay_s,
                reason=str(ending.exit),
                also=self._doom_with(child),
            )

    def _doom_with(self, failed: Node) -> list[str]:
        """Doom the children that are restarted with a failed one; return the names of those that run."""
        match self.spec.strategy:
            case Strategy.ONE_FOR_ONE:
                slots = []
            case Strategy.ONE_FOR_ALL:
                slots = self.slots
            case _:  # rest_for_one; replicas start together: none of them comes after another
                slots = self.slots[self.slots.index(self.slot_of(failed)) + 1 :]
        together = [node for slot in slots for node in slot.nodes if node is not failed]
        for node in together:
            node.doom()
            node.reset()
        return [node.name for node in together if node.is_doomed]

    def _end(self, child: Node, ending: Ending, *, is_ordered: bool = False) -> None:
        child.end()
        self._desk.report(
            ReportKind.CHILD_ENDED, child=child.name, incarnation=child.incarnation, reason=str(ending.exit)
        )
        self._let_go(child)
        if not child.significant or is_ordered:
            return
        if not ending.exit.is_normal:
            self._fail(f"`{child.name}` is significant and failed", ending)
        elif self.spec.auto_shutdown == "any" or self._significant_are_over():
            self._finish(f"significant `{child.name}` {ending.exit}")

    def _significant_are_over(self) -> bool:
        return all(node.state is ChildState.ENDED for node in self.nodes if node.significant)

    def _finish(self, reason: str) -> None:
        self._ending = self._own_ending(Exit(kind=ExitKind.NORMAL, detail=reason))
        self._desk.report(ReportKind.SUPERVISOR_STOPPING, supervisor=self.name, reason=reason)
        self._come_down()

    def _fail(self, headline: str, ending: Ending) -> None:
        reason = f"{headline}, so `{self.name}` stopped"
        first = ending.first if self._window.is_empty else self._window.first_cause
        self._ending = Ending(
            exit=Exit(kind=ExitKind.ERROR, detail=reason),
            first=first,
            last=ending.last,
            init_error=ending.init_error,
        )
        self._desk.report(ReportKind.ESCALATED, supervisor=self.name, reason=reason)
        self._come_down()

    def _come_down(self) -> None:
        self._move(Trigger.STOP)
        for pool in self.pools:
            pool.drain()
        for node in self.nodes:
            node.doom()
        self.wake()

    def _told_to_stop(self) -> Ending:
        return self._own_ending(Exit(kind=ExitKind.STOPPED))

    def _own_ending(self, exit_: Exit) -> Ending:
        return own_ending(self.name, self.incarnation, exit_, self._desk.now)

    def _forget(self, child: Node) -> None:
        if child.is_leaving:
            self._desk.report(ReportKind.CHILD_REMOVED, child=child.name, incarnation=child.incarnation)
        slot = self.slot_of(child)
        slot.nodes = [node for node in slot.nodes if node is not child]
        if not slot.nodes:
            self.slots.remove(slot)
            if slot.pool is not None:
                slot.pool.drain()

    def _build(self) -> list[BranchSlot]:
        return [self._make_slot(child, is_joining=False) for child in self.spec.children]

    def _make_slot(self, spec: ChildSpec | SupervisorSpec, *, is_joining: bool) -> BranchSlot:
        if isinstance(spec, SupervisorSpec):
            return Slot(id=spec.id, nodes=[Branch(spec, self, self._desk)], is_joining=is_joining)
        slot = place_of(spec, self, self.spec.backoff, self._desk, is_joining=is_joining)
        if slot.pool is not None:
            self.pools.append(slot.pool)
        return slot


def _ranks(slot: BranchSlot) -> list[Leaf]:
    return [node for node in slot.nodes if isinstance(node, Leaf)]
