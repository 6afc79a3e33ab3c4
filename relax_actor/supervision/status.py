"""What a status display shows of a supervision tree."""

import msgspec

from relax_actor.supervision.branch import Branch
from relax_actor.supervision.node import Node
from relax_actor.supervision.states import ChildState


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a status display: an actor, or a supervisor and what is below it."""

    name: str
    state: ChildState
    incarnation: int  # 0 before the first start
    restarts: int  # starts after the first
    last_exit: str  # how the last incarnation ended, if one did
    is_supervisor: bool
    children: tuple["NodeStatus", ...] = ()
    spares: tuple[str, ...] = ()  # a supervisor's, ready or not


def status_of(node: Node) -> NodeStatus:
    """Return where a node is now, and everything below it."""
    return NodeStatus(
        name=node.name,
        state=node.state,
        incarnation=node.incarnation,
        restarts=max(node.incarnation - 1, 0),
        last_exit="" if node.last_exit is None else str(node.last_exit),
        is_supervisor=isinstance(node, Branch),
        children=tuple(map(status_of, node.nodes)) if isinstance(node, Branch) else (),
        spares=tuple(spare.name for _, spare in node.spares()) if isinstance(node, Branch) else (),
    )
