"""An actor's way to the rows, wherever it runs: in place on the queue's host, by its dock from any other.

    rows.write(...) -> refs, which go into records      rows.fetch(refs) -> an Arrival
    rows.hand_over(records) -> a HandOver                once it is done: rows.read(ref)
    once it is done: put its records

On the queue's host both are done at once. Elsewhere bytes travel in between, and nobody waits for them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol

import numpy.typing as npt

from relax_actor.actor import Context
from relax_actor.homes import LoopHosts
from relax_actor.protocol import TensorRef
from relax_actor.roles.dock import RowDock
from relax_actor.roles.remote_rows import RemoteRows
from relax_actor.transfer_queue.memory import spill_space
from relax_actor.transfer_queue.storage import (
    Record,
    RowReader,
    RowWriter,
)
from transport.shm import SegmentSpaceError, ShmSpace


class Arrival(Protocol):
    """Rows on their way here."""

    def done(self) -> bool:
        """Whether all that still exist can be read."""
        ...


class HandOver(Protocol[Record]):
    """Rows on their way to the queue's host."""

    sent: Sequence[Record]
    """What is handed over, as it was written."""

    def done(self) -> bool:
        """Whether there is an answer."""
        ...

    def failure(self) -> str:
        """Return why it has to be repeated, or nothing."""
        ...

    def records(self) -> list[Record]:
        """Return the records with references that are valid on the queue's host, once there is no failure."""
        ...


class Rows(Protocol):
    """See the module."""

    @property
    def is_crowded(self) -> bool:
        """Whether so much is on its way that no more should be written for now."""
        ...

    def write(self, rows: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[dict[str, TensorRef]]:
        """Write rows of named arrays; see `storage.RowWriter.write`."""
        ...

    def hand_over(self, records: Sequence[Record], *, again: bool = False) -> HandOver[Record]:
        """Bring what records refer to, as `write` returned it, to the queue's host."""
        ...

    def fetch(self, refs: Sequence[TensorRef]) -> Arrival:
        """Bring what leases refer to here."""
        ...

    def read(self, ref: TensorRef) -> npt.NDArray[Any]:
        """Return an array that has arrived, read-only.

        Raises:
            SegmentMissingError: the row was freed: nobody needs it any more.
        """
        ...


def rows_of(
    context: Context, hosts: LoopHosts, on_full: Callable[[SegmentSpaceError], None] = lambda _error: None
) -> Rows:
    """Return an actor's way to the rows.

    Args:
        context: of the actor.
        hosts: of the run.
        on_full: told once for each write that has to wait for memory.
    """
    if not hosts.has_rows(context.host):
        dock = context.ref("dock", RowDock)
        return RemoteRows(dock, context.holder, context.run_id, wake=context.wake)
    space = ShmSpace(context.run_id, context.shm_root)
    reader = RowReader(space, spill_space(context.run_id, context.run_dir))
    return LocalRows(reader, RowWriter(space, context.holder, on_full=on_full))


class LocalRows:
    """Rows in the memory of this host.

    Args:
        reader: reads them in place.
        writer: writes them there.
    """

    is_crowded = False

    def __init__(self, reader: RowReader, writer: RowWriter) -> None:
        self.read, self.write = reader.read, writer.write

    def hand_over(self, records: Sequence[Record], *, again: bool = False) -> "Here[Record]":  # noqa: ARG002 - nothing to repeat
        """See `Rows`."""
        return Here(records)

    def fetch(self, refs: Sequence[TensorRef]) -> "Here[TensorRef]":
        """See `Rows`."""
        return Here(refs)


class Here(Generic[Record]):
    """What need not travel."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.sent = records

    def done(self) -> bool:
        """See `HandOver`."""
        return True

    def failure(self) -> str:
        """See `HandOver`."""
        return ""

    def records(self) -> list[Record]:
        """See `HandOver`."""
        return list(self.sent)
