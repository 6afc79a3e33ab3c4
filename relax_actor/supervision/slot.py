"""One place in a supervisor's order: the replicas of a child spec, or one nested supervisor."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from relax_actor.supervision.gang import Gang
from relax_actor.supervision.node import Node
from relax_actor.supervision.spares import SparePool
from relax_actor.supervision.spec import ChildSpec
from relax_actor.supervision.states import SETTLED
from relax_actor.supervision.streak import Streak

NodeT = TypeVar("NodeT", bound=Node)


@dataclass(kw_only=True, eq=False)
class Slot(Generic[NodeT]):
    """Nodes that start and stop together."""

    id: str
    nodes: list[NodeT]
    is_joining: bool = False
    """Added while the supervisor runs and not yet ready: its failure is nobody else's."""
    gang: Gang | None = None
    """The collective group of the replicas, where they are ranks."""
    pool: SparePool | None = None
    """The spares that stand in for the replicas, where it has some."""
    spec: ChildSpec | None = None
    """Of the replicas, as it is now; None where it is a supervisor."""
    streak: Streak = field(default_factory=Streak)

    @property
    def is_settled(self) -> bool:
        """Whether the next slot may start."""
        return all(node.state in SETTLED for node in self.nodes)
