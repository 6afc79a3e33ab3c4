"""Head <-> actor: it is there, knows its peers, meets the ranks of its gang, and stops."""

from relax_actor.actor.wire.base import Record


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """Actor to head: it can hear; the head answers with a `PeerUp` for every actor that is up."""

    name: str
    incarnation: int


class Ready(Record, frozen=True, kw_only=True, tag="ready"):
    """Actor to head: its constructor returned."""

    name: str
    incarnation: int
    address: str = ""  # where it takes calls of other hosts, if it does


class SpareReady(Record, frozen=True, kw_only=True, tag="spare_ready"):
    """Spare to head: its constructor returned; it waits for a name."""

    name: str


class PeerUp(Record, frozen=True, kw_only=True, tag="peer_up"):
    """Head to actor: this incarnation of this peer takes calls at this address."""

    name: str
    incarnation: int
    address: str


class PeerGone(Record, frozen=True, kw_only=True, tag="peer_gone"):
    """Head to actor: this incarnation is gone and everything it held is free."""

    name: str
    incarnation: int
    reason: str


class Stop(Record, frozen=True, kw_only=True, tag="stop"):
    """Head to actor: finish the message at hand, clean up, end."""

    reason: str
    drain_s: float = 0.0  # above 0: finish first what is under way, see `Actor.on_drain`


class Meeting(Record, frozen=True, kw_only=True, tag="meeting"):
    """Rank 0 to head: where the ranks of this epoch meet; the others are told to join only now."""

    name: str
    incarnation: int
    epoch: int
    rendezvous: str


class Regroup(Record, frozen=True, kw_only=True, tag="regroup"):
    """Head to rank: join the group of a new epoch."""

    epoch: int
    rank: int
    size: int
    rendezvous: str = ""  # where the ranks meet, fresh for each epoch; rank 0 opens it and tells the head


class GangAbort(Record, frozen=True, kw_only=True, tag="gang_abort"):
    """Head to a surviving rank's I/O thread: this epoch's group is broken."""

    epoch: int
    reason: str


class Released(Record, frozen=True, kw_only=True, tag="released"):
    """Rank to head: its main thread has left the collectives of that epoch."""

    name: str
    incarnation: int
    epoch: int


LifeRecord = Hello | Ready | SpareReady | PeerUp | PeerGone | Stop | Meeting | Regroup | GangAbort | Released
