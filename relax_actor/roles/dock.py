"""The dock: the actor beside the queue that brings rows from other hosts here, and from here to them.

The queue never sees their bytes: by the time a row is put it lies in this host's memory, and a lease
carries references wherever its holder is. So nothing that is large delays the ledger. Nor does it delay the
actor: it admits peers, and each has a link of its own (`transfer_queue/docking.py`), in a thread.
"""

import time
from typing import Final

import msgspec

from relax_actor.actor import Actor, endpoint
from relax_actor.errors import RelaxError
from relax_actor.ids import Holder
from relax_actor.transfer_queue.carrying import STALL_S
from relax_actor.transfer_queue.dock import Dock
from relax_actor.transfer_queue.docking import DockLink, SharedReader, Traffic
from relax_actor.transfer_queue.memory import spill_space
from relax_actor.transfer_queue.parcels import RowLinkError, RowsDamagedError
from relax_actor.transfer_queue.storage import RowReader
from transport.errors import TransportError
from transport.shm import SegmentSpaceError, ShmSpace
from transport.stream import Stream, StreamListener

DIAL_S: Final = 10.0
"""How long a peer asks for admission before it says that the dock is away."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Where a peer connects, and by what it is known there, once."""

    address: str
    ticket: bytes


class DockStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What went through a dock, since it was started."""

    parts: int
    taken_bytes: int
    slices: int
    given_bytes: int
    arriving: int  # parcels that are not whole yet
    links: int = 0
    strangers_refused: int = 0


class TakenForDeadError(RelaxError):
    """An incarnation wants to send rows that everybody else takes for dead."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        super().__init__(f"{holder} is taken for dead: its rows are not taken")


class RowDock(Actor):
    """Takes the rows of other hosts' producers, and gives rows to other hosts' readers."""

    def __init__(self) -> None:
        space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        self._dock = Dock(space, self.ctx.holder)
        self._rows = SharedReader(RowReader(space, spill_space(self.ctx.run_id, self.ctx.run_dir)))
        self._traffic = Traffic()
        self._links: dict[tuple[Holder, int], DockLink] = {}
        self._listener = StreamListener(self.ctx.listen or "127.0.0.1", STALL_S)

    @endpoint(timeout_s=DIAL_S, idempotent=True)
    def admit(self, peer: Holder, way: int) -> Admission:
        """Let a peer connect; its older link ends.

        Args:
            peer: who sends rows, or reads them.
            way: which of its links this is: it may have several at once.

        Raises:
            TakenForDeadError: it is gone.
        """
        if self._dock.is_gone(peer):
            raise TakenForDeadError(peer)
        if (old := self._links.get((peer, way))) is not None:
            old.close()
        link = DockLink(self._dock, self._rows, self._traffic, peer, self._say_full)
        self._links[peer, way] = link
        ticket = self._listener.ticket(lambda stream: self._serve(link, stream))
        return Admission(address=str(self._listener.address), ticket=ticket)

    @endpoint(idempotent=True)
    def status(self) -> DockStatus:
        """Say what went through here."""
        return DockStatus(
            parts=self._traffic.parts,
            taken_bytes=self._traffic.taken_bytes,
            slices=self._traffic.slices,
            given_bytes=self._traffic.given_bytes,
            arriving=self._dock.arriving,
            links=sum(link.is_open for link in self._links.values()),
            strangers_refused=self._listener.refused,
        )

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """End the links of a peer that is gone, and free what it has sent and not put."""
        self._dock.forget(name, incarnation)
        for peer, way in [*self._links]:
            if peer.name == name and peer.incarnation <= incarnation:
                self._links.pop((peer, way)).close()

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """End all links."""
        self._listener.close()
        for link in self._links.values():
            link.close()

    # -- threads --------------------------------------------------------------------------------

    def _serve(self, link: DockLink, stream: Stream) -> None:
        since = time.monotonic()
        try:
            link.run(stream)
        except (TransportError, RowLinkError) as error:
            if link.is_closed:
                return
            self.ctx.events.emit(
                "rows_damaged" if isinstance(error, RowsDamagedError) else "row_link_ended",
                peer=str(link.peer),
                seconds=time.monotonic() - since,
                reason=str(error),
            )

    def _say_full(self, error: SegmentSpaceError) -> None:
        self.ctx.events.emit("put_waits", reason=str(error))
