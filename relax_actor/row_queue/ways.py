"""The way of either end to the rows: in place on the queue's host, by the queue's dock from any other."""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy.typing as npt

from relax_actor.actor import Actor, Ref
from relax_actor.errors import RelaxError
from relax_actor.ids import Holder
from relax_actor.protocol import TensorRef
from relax_actor.roles.dock import RowDock
from relax_actor.roles.remote_rows import RemoteRows
from relax_actor.row_queue.answers import Where
from relax_actor.row_queue.blocks import Layout
from relax_actor.row_queue.both import Pause, Steps
from relax_actor.row_queue.records import Columns
from relax_actor.transfer_queue.memory import spill_space
from relax_actor.transfer_queue.parcels import array_bytes
from relax_actor.transfer_queue.storage import LOOK_S, RowReader
from transport.pool import SegmentPool
from transport.shm import SegmentMissingError, SegmentSpaceError, ShmSpace

if TYPE_CHECKING:
    from relax_actor.supervision.supervisor import Supervisor

A = TypeVar("A", bound=Actor)
Read = Callable[[TensorRef], npt.NDArray[Any]]
_outside = itertools.count()


class NoWayError(RelaxError):
    """The rows are on another host, and the queue has no dock."""

    def __init__(self, host: str, rows_host: str) -> None:
        self.host, self.rows_host = host, rows_host
        super().__init__(
            f"the rows are in the memory of {rows_host}, and this is {host}"
            "\n\nhint: start a relax_actor.roles.dock.RowDock beside the queue, and name it: RowQueue(dock=…)"
        )


class RowsNotCarriedError(RelaxError):
    """Rows did not get to the queue's host in time; the queue was not told of them."""

    def __init__(self, nbytes: int, fact: str) -> None:
        self.nbytes, self.fact = nbytes, fact
        super().__init__(f"{nbytes} bytes of rows could not be carried to the queue's host: {fact}")


class Site(Protocol):
    """What an end needs to know of where it is; an actor's context does."""

    run_id: str
    run_dir: Path
    holder: Holder

    @property
    def shm_root(self) -> str:
        """The folder of this host's shared memory."""
        ...

    @property
    def host(self) -> str:
        """The name of this host in the tree."""
        ...

    def ref(self, name: str, actor: type[A]) -> Ref[A]:
        """Return a ref to an actor of the tree."""
        ...


class Outside:
    """The site of one end in the process that has the supervisor; each is somebody else.

    Args:
        tree: its tree.
    """

    def __init__(self, tree: "Supervisor") -> None:
        self.run_id, self.run_dir, self.ref = tree.run_id, tree.run_dir, tree.ref
        self.shm_root, self.host = tree.shm_root, tree.host
        self.holder = Holder(f"head/{next(_outside)}", tree.incarnation)


class Local:
    """Rows in this host's memory.

    Args:
        site: of the end.
    """

    def __init__(self, site: Site) -> None:
        space = ShmSpace(site.run_id, site.shm_root)
        self._pool = SegmentPool(space, site.holder.name, site.holder.incarnation)
        self._reader = RowReader(space, spill_space(site.run_id, site.run_dir))

    def write(self, layout: Layout, patience_s: float) -> Steps[Columns]:
        """Copy rows to where the queue finds them; wait a while where memory is full."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                piece = self._pool.place(max(1, layout.nbytes))
                break
            except SegmentSpaceError:
                if time.monotonic() >= deadline:
                    raise
            yield Pause(timeout_s=LOOK_S)
        return layout.copy_to(piece.segment.buf, piece.name, piece.offset)

    def carry(self, columns: Columns, patience_s: float) -> Steps[Columns]:  # noqa: ARG002 - nothing to do
        """They are there."""
        yield from ()
        return columns

    def fetch(self, refs: Sequence[TensorRef]) -> Steps[Read]:  # noqa: ARG002 - nothing to do
        """They are here."""
        yield from ()
        return self._reader.read

    def trim(self) -> None:
        """Let go of memory that has no rows any more."""
        self._reader.trim()

    def close(self) -> None:
        """Give back what memory is kept for further rows."""
        self._pool.close()
        self._reader.close()


class Remote:
    """Rows in the memory of the queue's host, which is another one.

    Args:
        site: of the end.
        dock: carries them.
    """

    def __init__(self, site: Site, dock: str) -> None:
        self._rows = RemoteRows(site.ref(dock, RowDock), site.holder, site.run_id)

    def write(self, layout: Layout, patience_s: float) -> Steps[Columns]:  # noqa: ARG002 - memory of its own
        """Lay rows out as they will lie there."""
        yield from ()
        name, room = self._rows.room(max(1, layout.nbytes))
        return layout.copy_to(room, name, 0)

    def carry(self, columns: Columns, patience_s: float) -> Steps[Columns]:
        """Bring rows to the queue's host; again, until they are there."""
        deadline = time.monotonic() + patience_s
        refs = {name: column.ref() for name, column in columns.items()}
        handed = self._rows.hand_over([*refs.values()])
        while True:
            while not handed.done():
                yield Pause(handed.missing())
            failure = handed.failure()
            if not failure:
                break
            if time.monotonic() > deadline:
                raise RowsNotCarriedError(sum(map(array_bytes, refs.values())), failure)
            yield Pause(timeout_s=LOOK_S)
            handed = self._rows.hand_over([*refs.values()], again=True)
        moved = dict(zip(refs, handed.records(), strict=True))
        return {
            name: msgspec.structs.replace(column, segment=moved[name].segment, offset=moved[name].offset)
            for name, column in columns.items()
        }

    def fetch(self, refs: Sequence[TensorRef]) -> Steps[Read]:
        """Bring arrays here, each once; those that were freed meanwhile stay away."""
        arrival = self._rows.fetch(refs)
        while not arrival.done():
            yield Pause(arrival.missing())
        return _Held(refs, self._rows.read)

    def trim(self) -> None:
        """There is nothing to let go of."""

    def close(self) -> None:
        """End the link to the dock."""
        self._rows.close()


class _Held:
    """Fetched arrays that are here for as long as this is.

    Args:
        refs: what was fetched.
        read: gives what is here of it.
    """

    def __init__(self, refs: Sequence[TensorRef], read: Read) -> None:
        self._arrays: dict[TensorRef, npt.NDArray[Any]] = {}
        for ref in refs:
            with contextlib.suppress(SegmentMissingError):
                self._arrays[ref] = read(ref)

    def __call__(self, ref: TensorRef) -> npt.NDArray[Any]:
        if ref not in self._arrays:
            raise SegmentMissingError(ref.segment)
        return self._arrays[ref]


def way_to(site: Site, where: Where) -> Local | Remote:
    """Return an end's way to the rows.

    Raises:
        NoWayError: there is none.
    """
    if where.host == site.host:
        return Local(site)
    if not where.dock:
        raise NoWayError(site.host, where.host)
    return Remote(site, where.dock)
