"""How a rollout puts rows into the queue without waiting: sent again until they are answered.

A row takes two steps: its bytes come to the queue's host (`rows`), where they are already unless the rollout
is elsewhere; then the queue is told of it.
"""

from collections.abc import Sequence
from typing import Any

from relax_actor.actor import Context, Ref, Reply
from relax_actor.ids import LeaseId
from relax_actor.protocol import SampleChunk, SampleReady
from relax_actor.roles.queue import TransferQueue
from relax_actor.roles.rows import HandOver, Rows
from relax_actor.transfer_queue.records import Put

Records = list[SampleReady] | list[SampleChunk]

_ENDED = (Put.STALE, Put.MISFIT)


class Putting:
    """Sends samples, and chunks of samples, and looks at the answers later.

    Args:
        queue: who takes them; it recognises what it has.
        rows: the way of their bytes.
        context: of the rollout.
    """

    def __init__(self, queue: Ref[TransferQueue], rows: Rows, context: Context) -> None:
        self._queue, self._rows, self._context = queue, rows, context
        self._handed: list[HandOver[Any]] = []
        self._sent: list[tuple[Reply[list[Put]], Records, bool]] = []

    @property
    def leases(self) -> list[LeaseId]:
        """The leases of rows that the queue has not been told of, so that it must not take them back."""
        return [record.lease_id for handed in self._handed for record in handed.sent]

    @property
    def is_done(self) -> bool:
        """Whether the queue has confirmed all of them."""
        return not self._handed and not self._sent

    def send(self, records: Records) -> None:
        """Put whole samples, or chunks; at least one."""
        self._handed.append(self._rows.hand_over(records))
        self._tell_of_what_is_there()

    def settle(self) -> list[SampleChunk]:
        """Send again what was not answered; return the chunks whose leases have ended.

        What was sent again does not count: the queue may have had it, and let it go for a longer one.
        """
        self._tell_of_what_is_there()
        sent, self._sent = self._sent, []
        refused: list[SampleChunk] = []
        for reply, records, again in sent:
            if not reply.done():
                self._sent.append((reply, records, again))
            elif reply.exception() is not None:
                self._say_repeated(records, str(reply.exception()))
                self._tell(records, again=True)
            elif not again:
                refused += _refused(records, reply.result())
        return refused

    def _tell_of_what_is_there(self) -> None:
        handed, self._handed = self._handed, []
        for each in handed:
            if not each.done():
                self._handed.append(each)
            elif failure := each.failure():
                self._say_repeated(each.sent, failure)
                self._handed.append(self._rows.hand_over(each.sent, again=True))
            else:
                self._tell(each.records(), again=False)

    def _tell(self, records: Records, *, again: bool) -> None:
        method: Any = TransferQueue.put_chunks if _is_chunks(records) else TransferQueue.put_samples
        self._sent.append((self._queue.ask(method, self._context.holder, records), records, again))

    def _say_repeated(self, records: Sequence[SampleReady | SampleChunk], reason: str) -> None:
        self._context.events.emit("put_repeated", samples=len(records), reason=reason)


def _is_chunks(records: Records) -> bool:
    return isinstance(records[0], SampleChunk)


def _refused(records: Records, outcomes: Sequence[Put]) -> list[SampleChunk]:
    pairs = zip(records, outcomes, strict=True)
    return [row for row, put in pairs if put in _ENDED and isinstance(row, SampleChunk)]
