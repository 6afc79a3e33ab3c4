"""What an operator orders of a running tree, from another process on the head's host."""

from collections.abc import Callable

from relax_actor.actor.wire import Order, Ordered
from relax_actor.errors import ConfigError
from relax_actor.supervision import events
from relax_actor.supervision.policy import TreePolicy
from relax_actor.supervision.spec import SpecError

BY_ORDER = "killed by an operator"


class Orders:
    """Carries orders out. Every method runs in the courier's loop thread.

    Args:
        policy: knows how many replicas there are.
        decide: gives the policy an event; raises what it refuses.
    """

    def __init__(self, policy: TreePolicy, decide: Callable[[events.Event], None]) -> None:
        self._policy, self._decide = policy, decide

    def take(self, order: Order) -> Ordered:
        """Carry out an order; what cannot be done is in the answer."""
        try:
            return self._carried_out(order)
        except ConfigError as refusal:
            return Ordered(id=order.id, refusal=f"`{refusal.where}` {refusal.fact}", hint=refusal.hint)

    def _carried_out(self, order: Order) -> Ordered:
        match order.what:
            case "kill":
                self._decide(events.KillChild(name=order.name, reason=BY_ORDER))
                return Ordered(id=order.id)
            case "scale":
                self._decide(events.Scale(child=order.name, replicas=order.replicas))
            case "look":
                pass
            case _:
                raise SpecError(order.what, "is no order that this version knows")
        found = self._policy.replicas(order.name)
        return Ordered(id=order.id, replicas=found.count, starting=found.starting, leaving=found.leaving)
