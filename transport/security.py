"""The keys of a run: over TCP, who does not have them is never heard.

Every process of a run has the same two CurveZMQ key pairs, one for listeners and one for channels. A
channel knows the listener by its public key, so a forged listener learns nothing. libzmq by itself would let
any client in that knows the listener's public key; so a `Gatekeeper` answers libzmq's question about every
connection (ZAP, ZeroMQ RFC 27), on the event loop, by the client's public key. When nobody answers, the
connection is refused. Traffic is encrypted and has forward secrecy (RFC 26).

`ipc://` has no keys: an AF_UNIX socket is protected by the permissions of its folder.
"""

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any, Final

import zmq
from zmq.utils import z85

from transport.errors import KeysError
from transport.zmq_pump import Pump

_HEADER: Final = b"relax-actor keys 1"
_Z85: Final = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
ZAP_DOMAIN: Final = b"relax-actor"


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """Both key pairs of a run, each key in Z85 text of 40 bytes; secrets stay out of the repr."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "CurveKeys":
        """Make the keys of a new run from the kernel's random numbers."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "bytes") -> "CurveKeys":
        """Read what `to_bytes` wrote.

        Args:
            data: five lines.
            source: where they came from, for the error.

        Raises:
            KeysError: they are no keys, or a public and a secret key are no pair. No key is quoted.
        """
        header, *keys = data.rstrip(b"\n").split(b"\n")
        if header != _HEADER or len(keys) != 4 or not all(map(_Z85.fullmatch, keys)):
            raise KeysError(source, f"expected the line `{_HEADER.decode()}` and four keys of 40 bytes")
        server_public, server_secret, client_public, client_secret = keys
        if (_public_of(server_secret), _public_of(client_secret)) != (server_public, client_public):
            raise KeysError(source, "a public key and its secret key are no pair")
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )

    def to_bytes(self) -> bytes:
        """Write the keys as five lines of ASCII, for a pipe."""
        keys = (self.server_public, self.server_secret, self.client_public, self.client_secret)
        return b"\n".join((_HEADER, *keys)) + b"\n"

    def secure_listener(self, socket: "zmq.Socket[bytes]") -> None:
        """Let only channels of this run in; a `Gatekeeper` must run in the same context."""
        socket.curve_server = True
        socket.curve_publickey = self.server_public
        socket.curve_secretkey = self.server_secret
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_channel(self, socket: "zmq.Socket[bytes]") -> None:
        """Talk to nobody but a listener of this run."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret


class Gatekeeper:
    """Answers libzmq's question whether a peer may connect; once a context.

    Args:
        context: whose listeners ask.
        loop: where the answers are given.
        keys: of the run.
    """

    def __init__(self, context: "zmq.Context[Any]", loop: asyncio.AbstractEventLoop, keys: CurveKeys) -> None:
        self._allowed_key: bytes = z85.decode(keys.client_public)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        self._pump = Pump(loop, self._socket, self._answer)
        self.refused = 0

    def close(self) -> None:
        """Stop answering: from now on everybody is refused."""
        self._pump.close()

    def _answer(self, frames: list[memoryview]) -> None:
        asker, _, *request = map(bytes, frames)
        reply = zap_reply(request, self._allowed_key)
        self.refused += reply[2] != b"200"
        self._pump.send([asker, b"", *reply])


def zap_reply(request: list[bytes], allowed_key: bytes) -> list[bytes]:
    """Decide whether a peer may connect (ZeroMQ RFC 27).

    Args:
        request: version, request id, domain, address, identity, mechanism and credentials.
        allowed_key: the one client key to let in, 32 bytes.

    Returns:
        Version, request id, status code and text, user id and metadata; anything unexpected is refused.
    """
    request_id = request[1] if len(request) > 1 else b""
    wanted = [_ZAP_VERSION, request_id, ZAP_DOMAIN, b"CURVE", allowed_key]
    if [*request[:3], *request[5:]] == wanted:
        return [_ZAP_VERSION, request_id, b"200", b"OK", b"", b""]
    return [_ZAP_VERSION, request_id, b"400", b"not of this run", b"", b""]


def _public_of(secret: bytes) -> bytes | None:
    try:
        public: bytes = zmq.curve_public(secret)
    except zmq.ZMQError:  # 40 bytes of Z85 that are beyond 256 bits
        return None
    return public
