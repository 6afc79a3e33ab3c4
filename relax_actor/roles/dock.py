"""The dock: the actor beside the queue that brings rows from other hosts here, and from here to them.

The queue never sees their bytes: by the time a row is put it lies in this host's memory, and a lease
carries references wherever its holder is. So nothing that is large delays the ledger.
"""

import asyncio
import time
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.actor import Actor, endpoint
from relax_actor.faults import point
from relax_actor.ids import Holder
from relax_actor.transfer_queue.dock import Dock
from relax_actor.transfer_queue.memory import spill_space
from relax_actor.transfer_queue.parcels import Docked, ParcelPart, RowSlice
from relax_actor.transfer_queue.storage import LOOK_S, PATIENCE_S, RowReader
from transport.shm import SegmentMissingError, SegmentSpaceError, ShmSpace

CARRY_S: Final = 120.0
"""How long a part may take, from where it is to where it goes."""

MANY: Final = 4096


class DockStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What went through a dock, since it was started."""

    parts: int
    taken_bytes: int
    slices: int
    given_bytes: int
    arriving: int  # parcels that are not whole yet


class RowDock(Actor):
    """Takes the rows of other hosts' producers, and gives rows to other hosts' readers."""

    def __init__(self) -> None:
        space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        self._dock = Dock(space, self.ctx.holder)
        self._reader = RowReader(space, spill_space(self.ctx.run_id, self.ctx.run_dir))
        self._parts = self._taken_bytes = self._slices = self._given_bytes = 0

    @endpoint(concurrency=MANY, timeout_s=CARRY_S)
    async def take(self, holder: Holder, part: ParcelPart) -> Docked | None:
        """Store a part of a parcel; the part that makes it whole is answered by where it is.

        Raises:
            SegmentSpaceError: memory is full and stayed so.
        """
        self._parts += 1
        self._taken_bytes += part.data.nbytes
        deadline, is_told = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return self._dock.take(holder, part)
            except SegmentSpaceError as error:
                if time.monotonic() >= deadline:
                    raise
                if not is_told:
                    self.ctx.events.emit("put_waits", reason=str(error))
                is_told = True
            await asyncio.sleep(LOOK_S)

    @endpoint(timeout_s=CARRY_S, idempotent=True)
    def give(self, slices: list[RowSlice]) -> list[npt.NDArray[np.uint8] | None]:
        """Return bytes of arrays, in the order of `slices`; None where the row was freed."""
        given = [self._bytes_of(each) for each in slices]
        self._slices += len(given)
        self._given_bytes += sum(each.nbytes for each in given if each is not None)
        point("rows_given")
        return given

    @endpoint(idempotent=True)
    def status(self) -> DockStatus:
        """Say what went through here."""
        return DockStatus(
            parts=self._parts,
            taken_bytes=self._taken_bytes,
            slices=self._slices,
            given_bytes=self._given_bytes,
            arriving=self._dock.arriving,
        )

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """Free what a producer has sent and not put."""
        self._dock.forget(name, incarnation)

    def _bytes_of(self, piece: RowSlice) -> npt.NDArray[np.uint8] | None:
        try:
            array = self._reader.read(piece.ref)
        except SegmentMissingError:
            return None
        return array.reshape(-1).view(np.uint8)[piece.start : piece.stop]
