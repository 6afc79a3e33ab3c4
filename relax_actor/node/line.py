"""One end of the line between the head and a node agent: nothing is lost, repeated or taken from the past.

A ZeroMQ connection that breaks takes with it what was on its way, and a lease outlives a broken connection.
So orders and facts are numbered; each message says how many the sender has heard; what the other end should
have had since it last spoke is sent again (go-back-N: a message that is not the next one is dropped). Every
message bears the run epoch and the agent's incarnation: another one's is refused and counted.
"""

from collections import deque
from collections.abc import Callable

from relax_actor.actor import wire
from relax_actor.actor.wire import AnyRecord, Carried, Record
from transport import codec
from transport.control import Frame, Frames
from transport.errors import ChannelFull, CodecError, PeerUnreachable


class Line:
    """One end. Every method is called from one thread.

    Args:
        epoch: of the run; see `epoch.py`.
        incarnation: of the agent at one end.
        send: hands frames to the network; it may raise `ChannelFull` or `PeerUnreachable`.
    """

    def __init__(self, epoch: int, incarnation: int, send: Callable[[Frames], object]) -> None:
        self._epoch, self._incarnation, self._send = epoch, incarnation, send
        self._kept: deque[tuple[int, Frames]] = deque()
        self._sent = self._heard = 0
        self._sent_before = 0  # when the other end spoke last
        self.refused: dict[str, int] = {}

    def say(self, record: Record, frames: Frames = ()) -> None:
        """Send what must arrive, once and in order."""
        self._sent += 1
        body: Frames = [codec.encode(record), *frames]
        self._kept.append((self._sent, body))
        self._transmit(self._sent, body)

    def beat(self, record: Record) -> None:
        """Send what is worth nothing later: it may be lost."""
        self._transmit(0, [codec.encode(record)])

    def receive(self, frames: Frames) -> tuple[AnyRecord, Frames] | None:
        """Take in a message; None where there is nothing to do about it."""
        try:
            envelope = wire.decode(frames[0])
        except (CodecError, IndexError):
            self._refuse("malformed")
            return None
        return self.open(envelope, frames[1:])

    def open(self, envelope: AnyRecord, frames: Frames) -> tuple[AnyRecord, Frames] | None:
        """Take in a message whose first frame was read already."""
        try:
            record = wire.decode(frames[0])
        except (CodecError, IndexError):
            self._refuse("malformed")
            return None
        if reason := self._objection(envelope):
            self._refuse(reason)
            return None
        assert isinstance(envelope, Carried)  # noqa: S101 - else there is an objection
        self._acknowledged(envelope.heard)
        if envelope.number and not self._is_next(envelope.number):
            return None
        return record, frames[1:]

    def recover(self) -> None:
        """Send again what the other end should have had; to be called whenever it has sent a beat."""
        if self._kept and self._kept[0][0] <= self._sent_before:
            for number, body in self._kept:
                self._transmit(number, body)
        self._sent_before = self._sent

    def _transmit(self, number: int, body: Frames) -> None:
        envelope = Carried(epoch=self._epoch, incarnation=self._incarnation, number=number, heard=self._heard)
        message: list[Frame] = [codec.encode(envelope), *body]
        try:
            self._send(message)
        except (ChannelFull, PeerUnreachable):
            self._refuse("undeliverable")  # what is numbered is sent again

    def _objection(self, envelope: AnyRecord) -> str:
        if not isinstance(envelope, Carried):
            return "malformed"
        if envelope.epoch != self._epoch:
            return "epoch"
        return "" if envelope.incarnation == self._incarnation else "incarnation"

    def _is_next(self, number: int) -> bool:
        if number != self._heard + 1:
            return False
        self._heard = number
        return True

    def _acknowledged(self, heard: int) -> None:
        while self._kept and self._kept[0][0] <= heard:
            self._kept.popleft()

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
