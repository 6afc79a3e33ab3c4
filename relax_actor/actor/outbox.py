"""Messages from a listener to its peers, in order also where a peer's channel is full."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from relax_actor.actor.bulk import NOTHING, Staged
from relax_actor.actor.wire import Record
from transport import codec
from transport.control import Frame, Frames
from transport.errors import ChannelClosed, ChannelFull, PeerUnreachable, TransportError

MAX_UNSENT: Final = 10_000
"""Messages kept for one peer that does not read; beyond them the newest are dropped and counted."""


class Outbox:
    """What one listener says. With the courier's lock held.

    Args:
        send: hands frames for a peer to the network.
        flush_later: arranges that `flush` is called soon.
        counts: of what was not sent, by reason.
    """

    def __init__(
        self, send: Callable[[bytes, Frames], object], flush_later: Callable[[], None], counts: Counter[str]
    ) -> None:
        self._send, self._flush_later, self._counts = send, flush_later, counts
        self._unsent: dict[bytes, deque[tuple[list[Frame], Staged]]] = {}

    def say(self, peer: bytes, record: Record, payload: Staged = NOTHING) -> None:
        """Send to whoever connected as `peer`; one that is gone is not told."""
        message = [codec.encode(record), *payload.frames]
        if peer in self._unsent:
            self._keep(peer, message, payload)
        elif not self._sent(peer, message, payload):
            self._unsent[peer] = deque()
            self._keep(peer, message, payload)
            self._flush_later()

    def flush(self) -> None:
        """Try again to send what met a full channel."""
        for peer in list(self._unsent):
            waiting = self._unsent[peer]
            while waiting and self._sent(peer, *waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._unsent[peer]
        if self._unsent:
            self._flush_later()

    def _keep(self, peer: bytes, message: list[Frame], payload: Staged) -> None:
        if len(self._unsent[peer]) < MAX_UNSENT:
            self._unsent[peer].append((message, payload))
        else:
            self._counts["peer does not read"] += 1
            payload.release()

    def _sent(self, peer: bytes, message: list[Frame], payload: Staged) -> bool:
        """Return False if it must be tried again."""
        try:
            self._send(peer, message)
            if payload.pool is not None:
                payload.sent_to(peer.decode(errors="replace"))
        except ChannelFull:
            return False
        except (PeerUnreachable, ChannelClosed):
            self._counts["peer gone"] += 1
        except TransportError:  # too large; the caller of `say` cannot do anything about it any more
            self._counts["too large"] += 1
        if payload.pool is not None:
            payload.release()
        return True
