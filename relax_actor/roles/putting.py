"""How a rollout puts rows into the queue without waiting: sent again until they are answered."""

from collections.abc import Sequence
from typing import Any

from relax_actor.actor import Context, Ref, Reply
from relax_actor.protocol import SampleChunk, SampleReady
from relax_actor.roles.queue import TransferQueue
from relax_actor.transfer_queue.records import Put

Rows = list[SampleReady] | list[SampleChunk]

_ENDED = (Put.STALE, Put.MISFIT)


class Putting:
    """Sends samples, and chunks of samples, and looks at the answers later.

    Args:
        queue: who takes them; it recognises what it has.
        context: of the rollout.
    """

    def __init__(self, queue: Ref[TransferQueue], context: Context) -> None:
        self._queue, self._context = queue, context
        self._sent: list[tuple[Reply[list[Put]], Rows, bool]] = []

    def send(self, rows: Rows, *, again: bool = False) -> None:
        """Put whole samples, or chunks; at least one."""
        method: Any = TransferQueue.put_chunks if _is_chunks(rows) else TransferQueue.put_samples
        self._sent.append((self._queue.ask(method, self._context.holder, rows), rows, again))

    def settle(self) -> list[SampleChunk]:
        """Send again what the queue did not answer; return the chunks whose leases have ended.

        What was sent again does not count: the queue may have had it, and let it go for a longer one.
        """
        sent, self._sent = self._sent, []
        refused: list[SampleChunk] = []
        for reply, rows, again in sent:
            if not reply.done():
                self._sent.append((reply, rows, again))
            elif reply.exception() is not None:
                self._context.events.emit("put_repeated", samples=len(rows), reason=str(reply.exception()))
                self.send(rows, again=True)
            elif not again:
                refused += _refused(rows, reply.result())
        return refused


def _is_chunks(rows: Rows) -> bool:
    return isinstance(rows[0], SampleChunk)


def _refused(rows: Rows, outcomes: Sequence[Put]) -> list[SampleChunk]:
    pairs = zip(rows, outcomes, strict=True)
    return [row for row, put in pairs if put in _ENDED and isinstance(row, SampleChunk)]
