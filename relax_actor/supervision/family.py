"""Who is below a supervisor: its children in order, the actors and spares beneath them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from relax_actor.supervision.desk import Desk
from relax_actor.supervision.gang import Gang
from relax_actor.supervision.leaf import Leaf
from relax_actor.supervision.node import Node, Parent
from relax_actor.supervision.slot import Slot
from relax_actor.supervision.spares import Spare, SparePool
from relax_actor.supervision.spec import Backoff, ChildSpec, actor_names

if TYPE_CHECKING:
    from relax_actor.supervision.branch import Branch

Child: TypeAlias = "Leaf | Branch"
BranchSlot: TypeAlias = Slot["Leaf | Branch"]


class Family(Node):
    """A node that has children."""

    slots: list[BranchSlot]
    pools: list[SparePool]
    """The spares of its children, also of those that were removed."""

    @property
    def nodes(self) -> Iterator[Child]:
        """The children in the order they start."""
        return (node for slot in self.slots for node in slot.nodes)

    def branches_below(self) -> Iterator["Branch"]:
        """Return all supervisors below this one, top down."""
        for node in self.nodes:
            if not isinstance(node, Leaf):
                yield node
                yield from node.branches_below()

    def leaves(self) -> Iterator[Leaf]:
        """Return all actors below, in the order they start."""
        for node in self.nodes:
            if isinstance(node, Leaf):
                yield node
            else:
                yield from node.leaves()

    def slot_ids(self) -> list[str]:
        """Return the ids of the children."""
        return [slot.id for slot in self.slots]

    def spares(self) -> Iterator[tuple[SparePool, Spare]]:
        """Return the spares of all children, and whose they are."""
        for pool in self.pools:
            for spare in pool:
                yield pool, spare

    def find(self, name: str) -> list[Node]:
        """Return the child of that name, or all replicas of the child with that id."""
        return [node for slot in self.slots for node in slot.nodes if name in {node.name, slot.id}]

    def slot_named(self, child: str) -> BranchSlot | None:
        """Return the place of the child with that id."""
        return next((slot for slot in self.slots if slot.id == child), None)

    def slot_of(self, child: Node) -> BranchSlot:
        """Return the place of a child."""
        return next(slot for slot in self.slots if child in slot.nodes)


def place_of(
    spec: ChildSpec, parent: Parent, backoff: Backoff, desk: Desk, *, is_joining: bool
) -> BranchSlot:
    """Return the place for the actors of a child, with its spares and its gang.

    Args:
        spec: the child's.
        parent: its supervisor.
        backoff: of spares that fail, where the child has none of its own.
        desk: what the whole tree shares.
        is_joining: whether the supervisor runs already.
    """
    pool = SparePool(spec, backoff, parent, desk) if spec.spares else None
    return Slot(
        id=spec.id,
        nodes=[
            Leaf(name, replica, spec, parent, desk, pool=pool)
            for replica, name in enumerate(actor_names(spec))
        ],
        is_joining=is_joining,
        gang=Gang(spec.id, desk) if spec.gang else None,
        pool=pool,
        spec=spec,
    )
