"""The sockets of one process: where it listens, its channel to the head, its channels to callees.

They belong to the hub's lock (`transport.zmq_hub`), which is held by whoever calls anything here.
"""

from typing import Final

from transport.address import Address
from transport.control import Channel, Frames, Listener, OnReply, OnRequest
from transport.errors import ChannelClosed, PeerUnreachable
from transport.security import CurveKeys
from transport.zmq_control import ZmqNetwork
from transport.zmq_hub import Hub

LINGER_S: Final = 1.0
"""How long the last answers of a process may take to leave it, where libzmq's thread has to wait."""


class Sockets:
    """Peers by the identity that they connected with.

    Args:
        hub: who reads them.
        identity: of this process, for those it connects to.
        address: where to bind.
        head: the head's address; None in the head itself.
        remote: where to bind for peers on other hosts as well, if there are any.
        keys: of the run; needed for `tcp://`.
    """

    def __init__(
        self,
        hub: Hub,
        identity: bytes,
        address: Address,
        *,
        head: Address | None,
        remote: Address | None,
        keys: CurveKeys | None,
    ) -> None:
        self._hub, self._identity, self._address = hub, identity, address
        self._head_address, self._remote, self._keys = head, remote, keys
        self._network: ZmqNetwork
        self._listener: Listener
        self._remote_listener: Listener | None = None
        self._routes: dict[bytes, Listener] = {}  # of peers on other hosts
        self._head: Channel | None = None
        self._heard: OnRequest
        self._heard_head: OnReply

    def open(self, heard: OnRequest, heard_head: OnReply) -> None:
        """Bind and connect, in the running event loop.

        Args:
            heard: called with each message of a peer.
            heard_head: called with each message of the head.
        """
        self._heard, self._heard_head = heard, heard_head
        self._network = ZmqNetwork(keys=self._keys, hub=self._hub)
        self._listener = self._network.listen(self._address, heard)
        if self._remote is not None:
            self._remote_listener = self._network.listen(self._remote, self._heard_remote)
        self._connect_head()

    def close(self) -> None:
        """Close them all, once what was sent has left, or could not in time."""
        self._network.close(LINGER_S)

    @property
    def remote_address(self) -> Address | None:
        """Where peers on other hosts reach this process, with the port it got."""
        return self._remote_listener.address if self._remote_listener else None

    def is_remote(self, peer: bytes) -> bool:
        """Whether a peer connected from another host, as far as is known."""
        return peer in self._routes

    def connect(self, address: Address, on_message: OnReply) -> Channel:
        """Open a channel to a callee."""
        return self._network.connect(address, on_message, identity=self._identity)

    def rename(self, identity: bytes) -> None:
        """Connect to the head anew as somebody else; and to callees from now on."""
        self._identity = identity
        if self._head is not None:
            self._head.close()
            self._connect_head()

    def send(self, peer: bytes, frames: Frames) -> None:
        """Send frames to whoever connected as `peer`.

        Raises:
            ChannelFull: the peer does not keep up.
            PeerUnreachable: it is not connected.
            ChannelClosed: this process is ending.
        """
        try:
            self._routes.get(peer, self._listener).send(peer, frames)
        except (PeerUnreachable, ChannelClosed):
            self._routes.pop(peer, None)
            raise

    def send_head(self, frames: Frames) -> None:
        """Send frames to the head, if there is one."""
        if self._head is not None:
            self._head.send(frames)

    def _connect_head(self) -> None:
        if self._head_address is not None:
            self._head = self.connect(self._head_address, self._heard_head)

    def _heard_remote(self, peer: bytes, frames: list[memoryview]) -> None:
        assert self._remote_listener is not None  # noqa: S101 - it is who hears
        self._routes[peer] = self._remote_listener
        self._heard(peer, frames)
