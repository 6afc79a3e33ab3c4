"""Observer and operator <-> head: what there is to see of an actor, and what is to be changed."""

from relax_actor.actor.wire.base import Record


class Look(Record, frozen=True, kw_only=True, tag="look"):
    """Observer to head, head to node agent: tell what there is to see of an incarnation, alive or dead."""

    id: int
    host: str  # as the tree names it
    name: str
    incarnation: int
    wants_stacks: bool = False


class Seen(Record, frozen=True, kw_only=True, tag="seen"):
    """Node agent to head, head to observer: the answer to a `Look`."""

    id: int
    sight: bytes = b""  # JSON, see `node.sight`; empty where there is no such host


class Order(Record, frozen=True, kw_only=True, tag="order"):
    """Operator to head: change something of the run, or say how far a change has come."""

    id: int
    what: str  # `kill`, `scale` or `look`
    name: str  # an actor to kill, else a child
    replicas: int = 0  # it is to have


class Ordered(Record, frozen=True, kw_only=True, tag="ordered"):
    """Head to operator: the answer to an `Order`."""

    id: int
    refusal: str = ""  # empty: it is being done
    hint: str = ""
    replicas: int = 0  # there are, those that come and go included
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


SeeingRecord = Look | Seen | Order | Ordered
