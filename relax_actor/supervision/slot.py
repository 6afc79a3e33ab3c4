"""One place in a supervisor's order: the replicas of a child spec, or one nested supervisor."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from relax_actor.supervision.node import Node
from relax_actor.supervision.states import SETTLED

NodeT = TypeVar("NodeT", bound=Node)


@dataclass(kw_only=True, eq=False)
class Slot(Generic[NodeT]):
    """Nodes that start and stop together."""

    id: str
    nodes: list[NodeT]
    is_joining: bool = False
    """Added while the supervisor runs and not yet ready: its failure is nobody else's."""

    @property
    def is_settled(self) -> bool:
        """Whether the next slot may start."""
        return all(node.state in SETTLED for node in self.nodes)
