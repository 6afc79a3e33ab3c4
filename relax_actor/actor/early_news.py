"""Death notices on the short way, heard by the calls of the head's own process before the tree hears them."""

import socket
from collections.abc import Callable
from typing import Final

from relax_actor.actor.wire import AnyRecord, Dying
from transport.control import Frames
from transport.zmq_hub import Hub

EARLY_BYTES: Final = 64 * 1024
"""The most a death notice takes."""


class EarlyNews:
    """The ends of the ways by which node agents of this host tell of deaths; see `node.early`.

    Args:
        hub: who reads them, with its lock held.
        decode: reads a record, or counts it as malformed.
        on_dying: told of each death.
    """

    def __init__(
        self, hub: Hub, decode: Callable[[Frames], AnyRecord | None], on_dying: Callable[[Dying], object]
    ) -> None:
        self._hub, self._decode, self._on_dying = hub, decode, on_dying
        self._news: set[socket.socket] = set()

    def hear(self, news: socket.socket) -> None:
        """Hear of deaths as soon as they are felt, until the other end is closed.

        Args:
            news: not blocking; a datagram is a record. It is closed here.
        """
        with self._hub.lock:
            self._news.add(news)
            self._hub.add_reader(news.fileno(), lambda: self._heard(news))

    def close(self) -> None:
        """Close what is open, after the hub."""
        for news in self._news:
            news.close()

    def _heard(self, news: socket.socket) -> None:
        try:
            frame = news.recv(EARLY_BYTES)
        except BlockingIOError:
            return
        if not frame:
            self._hub.remove_reader(news.fileno())
            self._news.remove(news)
            news.close()
        elif isinstance(record := self._decode([frame]), Dying):
            self._on_dying(record)
