"""The control lines of a process: a head's to its agents and actors, an actor's to a head on another host.

See `node.line` for what a line promises. On the head's own host an actor needs none: there no connection
breaks while both of its ends live.
"""

import asyncio
from collections.abc import Callable

from relax_actor.actor import wire
from relax_actor.actor.wire import AnyRecord, Carried, Record
from relax_actor.node.line import Line
from transport.control import Frames

Message = tuple[AnyRecord, Frames]


class Lines:
    """A head's ends, by peer.

    Args:
        send: hands frames for a peer to the network.
    """

    def __init__(self, send: Callable[[bytes, Frames], object]) -> None:
        self._send = send
        self._lines: dict[bytes, Line] = {}

    def open(self, peer: bytes, epoch: int, incarnation: int) -> None:
        """Expect a peer, and keep what it is told until it has heard it."""
        self._lines[peer] = Line(epoch, incarnation, lambda frames: self._send(peer, frames))

    def close(self, peer: bytes) -> None:
        """Forget a peer that is gone."""
        self._lines.pop(peer, None)

    def say(self, peer: bytes, record: Record, frames: Frames) -> bool:
        """Tell a peer; False if there is no line to it."""
        line = self._lines.get(peer)
        if line is None:
            return False
        line.say(record, frames)
        return True

    def receive(self, peer: bytes, envelope: Carried, frames: Frames) -> Message | None:
        """Take in a message; a peer that is not expected is handed on as its bare envelope."""
        line = self._lines.get(peer)
        if line is None:
            return envelope, frames
        message = line.open(envelope, frames)
        if message is not None and isinstance(message[0], wire.Renew):
            line.beat(wire.Renewed(number=message[0].number))
            line.recover()
        return message


class HeadLine:
    """An actor's end.

    Args:
        epoch: of the run.
        incarnation: of the actor.
        beat_s: how often it says what it has heard.
    """

    def __init__(self, epoch: int, incarnation: int, beat_s: float) -> None:
        self._epoch, self._incarnation, self._beat_s = epoch, incarnation, beat_s
        self._line: Line
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop, send: Callable[[Frames], object]) -> None:
        """Begin to beat; loop thread."""
        self._loop = loop
        self._line = Line(self._epoch, self._incarnation, send)
        self._beat()

    def say(self, record: Record) -> None:
        """Tell the head; loop thread."""
        self._line.say(record)

    def receive(self, envelope: Carried, frames: Frames) -> Message | None:
        """Take in a message of the head."""
        message = self._line.open(envelope, frames)
        if message is not None and isinstance(message[0], wire.Renewed):
            self._line.recover()
            return None
        return message

    def _beat(self) -> None:
        self._line.beat(wire.Renew(number=0))
        self._loop.call_later(self._beat_s, self._beat)
