"""Who takes calls, and where: what the head tells every actor that listens, and its own courier.

An actor is told of another one by the address that it reaches it by: on its own host the socket, from
another host the port that the actor itself has named.
"""

from collections.abc import Callable

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.actor.wire import PeerUp, Record
from relax_actor.ids import Holder
from relax_actor.supervision.site import Key


class Directory:
    """The actors of a tree as its actors know them. Every method runs in the courier's loop thread.

    Args:
        courier: the head's.
        host_of: names the host of an actor, or of the head for None.
    """

    def __init__(self, courier: Courier, host_of: Callable[[Key | None], str | None]) -> None:
        self._courier, self._host_of = courier, host_of
        self._listeners: set[bytes] = set()
        self._up: dict[str, wire.Ready] = {}
        self._near: dict[Key, str] = {}  # where actors take the calls of their own host

    def placed(self, key: Key, address: str) -> None:
        """Note where an incarnation will take the calls of its own host."""
        self._near[key] = address

    def renamed(self, old: Key, new: Key) -> None:
        """Note that a spare has become somebody, who listens from now on under that name."""
        self._near[new] = self._near.pop(old, "")

    def hello(self, peer: bytes, was: Key | None) -> None:
        """Tell an actor who is up, and from now on what becomes of them.

        Args:
            peer: the actor.
            was: who it was, if it was a spare.
        """
        self._listeners.add(peer)
        if was is not None:
            self._listeners.discard(identity_of(*was))
        for name in self._up:
            self._courier.say(peer, self._seen_by(key_of(peer), name))

    def ready(self, record: wire.Ready) -> None:
        """Tell everybody that an incarnation takes calls."""
        self._up[record.name] = record
        self._courier.peer_up(self._seen_by(None, record.name))
        for peer in self._listeners:
            self._courier.say(peer, self._seen_by(key_of(peer), record.name))

    def dying(self, record: wire.Dying) -> None:
        """Tell everybody that an incarnation takes no more calls."""
        self._forget(record.name, record.incarnation)
        self._courier.peer_dying(record)
        self._broadcast(record)

    def gone(self, record: wire.PeerGone) -> None:
        """Tell everybody that nothing of an incarnation is left."""
        self._forget(record.name, record.incarnation)
        self._near.pop((record.name, record.incarnation), None)
        self._courier.peer_gone(record)
        self._broadcast(record)

    def _forget(self, name: str, incarnation: int) -> None:
        if (up := self._up.get(name)) is not None and up.incarnation == incarnation:
            del self._up[name]
        self._listeners.discard(identity_of(name, incarnation))

    def _seen_by(self, viewer: Key | None, name: str) -> PeerUp:
        """Say where an actor takes the calls of another one, or of the head."""
        up = self._up[name]
        key = up.name, up.incarnation
        is_near = self._host_of(viewer) == self._host_of(key)
        address = self._near[key] if is_near else up.address
        return PeerUp(name=name, incarnation=up.incarnation, address=address)

    def _broadcast(self, record: Record) -> None:
        for listener in self._listeners:
            self._courier.say(listener, record)


def key_of(peer: bytes) -> Key:
    """Return which incarnation connected as `peer`."""
    name, _, incarnation = peer.decode(errors="replace").rpartition("#")
    return name, int(incarnation) if incarnation.isdecimal() else 0


def identity_of(name: str, incarnation: int) -> bytes:
    """Return as whom an incarnation connects."""
    return str(Holder(name, incarnation)).encode()
