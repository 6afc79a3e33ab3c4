"""Hands each fact to the actor or the spare that it concerns, and to those who are linked to a failed one."""

from relax_actor.supervision.branch import Branch
from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import (
    AwaitsHost,
    Decided,
    Dying,
    Exit,
    Failed,
    Gone,
    HostFound,
    InitFailed,
    LeafEvent,
    LinkAdded,
    Ready,
    Released,
    SpareReady,
)
from relax_actor.supervision.leaf import Leaf
from relax_actor.supervision.links import Links
from relax_actor.supervision.spares import Spare, SparePool
from relax_actor.supervision.spec import SpecError


class News:
    """What reaches whom in one tree.

    Args:
        root: the tree.
        desk: what it shares.
    """

    def __init__(self, root: Branch, desk: Desk) -> None:
        self._root, self._desk = root, desk
        self._links = Links()

    def tell(self, event: LeafEvent) -> None:
        """Tell an actor what is known of one of its incarnations, or a spare of itself."""
        leaf = self._find_leaf(event.name)
        is_heard = leaf is not None and (leaf.is_alive or isinstance(event, Decided))
        if leaf is None or not is_heard or leaf.incarnation != event.incarnation:
            self.tell_spare(event)
            return
        match event:
            case Ready():
                leaf.ready()
            case InitFailed():
                leaf.init_failed(event.error)
            case Dying():
                self._dying(leaf)
            case Failed():
                leaf.fail(event.exit)
            case Released():
                leaf.released(event.epoch)
            case AwaitsHost():
                leaf.await_host(event.host)
            case HostFound():
                leaf.host_found()
            case Decided():
                leaf.decided(event.decision, event.detail)
            case _:
                self._gone(leaf, event.exit)

    def tell_spare(self, event: LeafEvent | SpareReady) -> None:
        """Tell a spare; what concerns nobody is reported and changes nothing."""
        found = self._find_spare(event.name)
        match event:
            case SpareReady() if found:
                found[0].ready(found[1])
            case Gone() if found:
                found[0].gone(found[1], event.exit)
            case InitFailed() if found:
                found[1].kill()
            case _:
                self._report_stale(event)

    def link(self, event: LinkAdded) -> None:
        """Link two actors.

        Raises:
            SpecError: one of them is no actor of the tree.
        """
        for name in (event.a, event.b):
            if self._find_leaf(name) is None:
                raise SpecError(name, "is no actor of this tree, so it cannot be linked")
        self._links.add(event.a, event.b)

    def _dying(self, leaf: Leaf) -> None:
        """Break its gang at once, unless it may be ending well."""
        if leaf.dying():
            self._branch_of(leaf).dying(leaf, "is dying")

    def _gone(self, leaf: Leaf, exit_: Exit) -> None:
        """Let its supervisor decide; whoever is linked to a failed actor is killed."""
        is_failure = leaf.is_failure(exit_) and not leaf.is_doomed and not leaf.is_leaving
        is_own = is_failure and not self._branch_of(leaf).is_closing
        leaf.gone(exit_)
        for name in self._links.with_fate_of(leaf.name) if is_own else ():
            other = self._find_leaf(name)
            if other is not None and other.fail_with(leaf.name, exit_):
                self._desk.report(
                    ReportKind.LINKED_KILL, child=name, incarnation=other.incarnation, because=leaf.name
                )

    def _report_stale(self, event: LeafEvent | SpareReady) -> None:
        self._desk.report(
            ReportKind.STALE_EVENT,
            child=event.name,
            incarnation=1 if isinstance(event, SpareReady) else event.incarnation,
            current=self._desk.incarnations.get(event.name, 0),
            event=type(event).__name__,
        )

    def _find_leaf(self, name: str) -> Leaf | None:
        return next((leaf for leaf in self._root.leaves() if leaf.name == name), None)

    def _find_spare(self, name: str) -> tuple[SparePool, Spare] | None:
        spares = (each for branch in self._root.branches() for each in branch.spares())
        return next((each for each in spares if each[1].name == name), None)

    def _branch_of(self, leaf: Leaf) -> Branch:
        return next(branch for branch in self._root.branches() if leaf in branch.nodes)
