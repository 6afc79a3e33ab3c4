"""What is asked of a running tree: a child more or less, other replicas, an actor's end. Pure."""

from relax_actor.supervision.branch import Branch
from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import AddChild, KillChild, RemoveChild, Scale
from relax_actor.supervision.family import BranchSlot
from relax_actor.supervision.node import Node
from relax_actor.supervision.scaling import Replicas, joining, leaving
from relax_actor.supervision.spec import ChildSpec, SpecError, SupervisorSpec, ids
from relax_actor.supervision.spec_checks import check


class Requests:
    """Grants what can be done, and refuses the rest.

    Args:
        root: the tree.
        desk: what it shares.
    """

    def __init__(self, root: Branch, desk: Desk) -> None:
        self._root, self._desk = root, desk

    def replicas(self, child: str) -> Replicas:
        """Return how many replicas a child has, and which of them come or go.

        Raises:
            SpecError: there is no such child.
        """
        slot = self._find_slot(child)[1]
        return Replicas(spec=slot.spec, count=len(slot.nodes), starting=joining(slot), leaving=leaving(slot))

    def grant(self, event: AddChild | RemoveChild | Scale | KillChild) -> None:
        """Change the tree.

        Raises:
            SpecError: the change makes no sense; nothing is changed.
        """
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


def _check_whole(branch: Branch, nodes: list[Node]) -> None:
    for slot in branch.slots:
        if slot.gang is not None and 0 < len(set(nodes) & set(slot.nodes)) < len(slot.nodes):
            raise SpecError(nodes[0].name, f"is a rank of a gang; remove `{slot.id}` as a whole")


def _check_new(spec: ChildSpec | SupervisorSpec, taken: set[str]) -> None:
    names = ids(spec)
    for each in names:
        if each in taken or names.count(each) > 1:
            raise SpecError(each, "names two children; an id is used once in a tree")
