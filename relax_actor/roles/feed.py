"""How the trainer gets its batches: whole, or in parts while the rest of one is still generated.

The next request is sent as soon as it can be: before what came is trained on, and right behind the
acknowledgement of the last batch.
"""

import time
from collections.abc import Generator
from typing import Any, TypeVar

from relax_actor.actor import Context, Ref, Reply
from relax_actor.errors import RemoteError
from relax_actor.faults import point
from relax_actor.ids import LeaseId, PolicyVersion
from relax_actor.protocol import BatchLease
from relax_actor.roles.queue import TransferQueue

T = TypeVar("T")
Waiting = Generator[Reply[Any] | None, None, T]
"""A part of the trainer's life: yields what it waits for, returns its result."""

PARK_S = 20.0


class Feed:
    """Asks for batches.

    Args:
        queue: who has them.
        context: of the trainer.
        in_parts: whether a batch may come before all of it is there.
    """

    def __init__(self, queue: Ref[TransferQueue], context: Context, *, in_parts: bool) -> None:
        self._queue, self._context, self._in_parts = queue.within(PARK_S * 2), context, in_parts
        self._asked: Reply[Any] | None = None
        self._lease_id: LeaseId | None = None
        self._groups = 0  # of this lease that are here

    def ask(self, version: PolicyVersion) -> Reply[Any]:
        """Ask for the next batch, or for what follows of this one."""
        holder = self._context.holder
        if self._in_parts:
            have = self._lease_id, self._groups
            self._asked = self._queue.ask(TransferQueue.lease_part, holder, version, *have, PARK_S)
        else:
            self._asked = self._queue.ask(TransferQueue.lease_batch, holder, version, PARK_S)
        return self._asked

    def take(self, version: PolicyVersion) -> Waiting[tuple[BatchLease | None, float]]:
        """Return what comes next, and how many seconds it was waited for; None while nothing came.

        Raises:
            RemoteError: the queue refuses.
        """
        since, reply = time.monotonic(), self._asked or self.ask(version)
        yield reply
        self._asked = None
        part = answer(reply)
        if part is not None:
            self._took(part, version)
        return part, time.monotonic() - since

    @property
    def has_some(self) -> bool:
        """Whether a part of a batch is here and the rest is not."""
        return self._lease_id is not None

    def _took(self, part: BatchLease, version: PolicyVersion) -> None:
        if part.lease_id != self._lease_id:
            point("batch_leased")
        self._lease_id, self._groups = (None, 0) if part.is_whole else (part.lease_id, part.groups_so_far)
        if not part.is_whole:
            self.ask(version)


def answer(reply: Reply[T]) -> T | None:
    """Return the queue's answer, or None while it is away.

    Raises:
        RemoteError: it refuses.
    """
    raise_refusal(reply)
    return reply.result() if reply.exception() is None else None


def raise_refusal(reply: Reply[Any]) -> None:
    """Raise what the queue refuses with.

    Raises:
        RemoteError: it does.
    """
    error = reply.exception()
    if isinstance(error, RemoteError):
        raise error
