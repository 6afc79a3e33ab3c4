"""The store of a host: serves its policy versions to the next host of the chain, and pulls them there.

On the trainer's host it only serves what the publisher wrote. Everything heavy is done by threads, one a link
(`dcs/relay/`), so that the actor can be asked and stopped at any time. It holds nothing that its next
incarnation cannot find again: complete versions are adopted, half ones are pulled anew.
"""

import time
from typing import Final, Literal

import msgspec

from relax_actor.actor import endpoint
from relax_actor.dcs.relay.chain import Chain
from relax_actor.dcs.relay.intake import Intake
from relax_actor.dcs.relay.pulling import Puller
from relax_actor.dcs.relay.records import RelayError
from relax_actor.dcs.relay.riding import Rider
from relax_actor.dcs.relay.serving import ServingLink
from relax_actor.dcs.shelf import Shelf
from relax_actor.dcs.store import HostStore
from relax_actor.ids import Holder, PolicyVersion
from relax_actor.roles.grouping import GroupingActor
from transport.address import Address
from transport.errors import TransportError
from transport.shm import ShmSpace
from transport.stream import Stream, StreamListener

LOOK_S: Final = 0.02
"""How often the word of the trainer's publisher is looked at: a load from memory."""

ALIVE_FRAC: Final = 0.25
"""A link that has nothing to say says so after this share of the patience."""

SUSPECT_PATIENCES: Final = 0.5
"""How many patiences a store is passed over after its first failure: one that died is soon back."""

RETRY_PATIENCES: Final = 0.1
"""How many patiences a store is given that nobody stands in for, before it is asked again."""


class Linked(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store below connects, and by what it is known there."""

    address: str
    ticket: bytes


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a store has and whom it is linked with."""

    newest: PolicyVersion | None  # complete
    incoming: PolicyVersion | None
    upstream: str  # empty on the trainer's host, and before the first link
    downstream: tuple[str, ...]
    strangers_refused: int
    group_epoch: int = 0  # of the group it leads or rides in, 0 while there is none


class PolicyStore(GroupingActor):
    """The policy versions of one host.

    Args:
        chain: the names of all stores, the trainer's host's first; this one is among them.
        keep: how many versions stay readable.
        budget_bytes: the most that versions may take here, 0 is no limit.
        patience_s: how long a neighbour may be silent before it is passed over.
        shm_root: where this host's shared memory is; empty: as for all actors of the host.
        stages: whether it brings versions to the GPUs of this host.
        relay: how versions come from host to host: along the chain, or by broadcasts to a group of all stores
            that are there, with the chain for whoever is not.
    """

    def __init__(
        self,
        chain: tuple[str, ...],
        *,
        keep: int = 2,
        budget_bytes: int = 0,
        patience_s: float = 5.0,
        shm_root: str = "",
        stages: bool = False,
        relay: Literal["chain", "group"] = "chain",
    ) -> None:
        self._patience_s = patience_s
        space = ShmSpace(self.ctx.run_id, shm_root or self.ctx.shm_root)
        before = chain[: chain.index(self.ctx.name)]
        shelf = Shelf(space, keep=keep, budget_bytes=budget_bytes) if before else None
        self._store = HostStore(space, shelf)
        self._listener = StreamListener(self.ctx.listen or "127.0.0.1", patience_s)
        self._links: dict[str, tuple[Holder, ServingLink]] = {}
        if stages:
            self.start_staging(space)
        self._rider: Rider | None = None
        self._puller = self._start_puller(before, relay) if before else None
        if relay == "group" and not before and chain[1:]:
            self.start_leading(self._store, chain[1:])

    @endpoint(idempotent=True)
    def link(self, downstream: Holder, epoch: int) -> Linked:
        """Let a store pull from this one; its older link ends.

        Raises:
            RelayError: the request is older than the link that there is.
        """
        if (found := self._links.get(downstream.name)) is not None:
            holder, old = found
            if (downstream.incarnation, epoch) < (holder.incarnation, old.epoch):
                raise RelayError(downstream.name, f"is at epoch {old.epoch} of {holder}, not {epoch}")
            old.close()
        link = ServingLink(self._store, str(downstream), epoch, alive_s=self._patience_s * ALIVE_FRAC)
        self._links[downstream.name] = (downstream, link)
        ticket = self._listener.ticket(lambda stream: self._serve(link, stream))
        return Linked(address=str(self._listener.address), ticket=ticket)

    @endpoint(idempotent=True)
    def status(self) -> StoreStatus:
        """Say what is here and whom this store is linked with."""
        incoming = self._store.incoming
        return StoreStatus(
            newest=self._store.latest(),
            incoming=incoming.version if incoming is not None else None,
            upstream=self._puller.upstream if self._puller is not None else "",
            downstream=tuple(sorted(name for name, (_, link) in self._links.items() if link.is_open)),
            strangers_refused=self._listener.refused,
            group_epoch=self._group_epoch(),
        )

    def step(self) -> float | None:
        """See whether the publisher published; fail if the pulling thread did."""
        if self.failure is not None:
            raise self.failure
        if self.stager is not None:
            self.stager.tick()
        if self._puller is None:
            self._store.look()
        return LOOK_S if self._puller is None or self.stager is not None else None

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """End the link of a store that is gone, whatever its kernel still has to say."""
        holder, link = self._links.get(name, (None, None))
        if link is not None and holder is not None and holder.incarnation <= incarnation:
            link.close()

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """End all links; what is half here goes."""
        self._listener.close()
        if self.stager is not None:
            self.stager.close()
        self.stop_leading(self._patience_s)
        for _, link in self._links.values():
            link.close()
        if self._puller is not None:
            self._puller.close()
            self._pulling.join(self._patience_s)
            if not self._pulling.is_alive():
                self._store.close()

    # -- threads --------------------------------------------------------------------------------

    def _start_puller(self, before: tuple[str, ...], relay: str) -> Puller:
        emit, retry_s = self.ctx.events.emit, self._patience_s * RETRY_PATIENCES
        intake = Intake(self._store, emit)
        if relay == "group":
            self._rider = self.make_rider(intake, before[0], retry_s)
        chain = Chain(before, suspect_s=self._patience_s * SUSPECT_PATIENCES)
        puller = Puller(self._store, intake, chain, self._dial, emit, retry_s=retry_s, rider=self._rider)
        self._pulling = self.in_thread("puller", puller.run)
        return puller

    def _group_epoch(self) -> int:
        if self.leader is not None:
            return self.leader.epoch
        return self._rider.epoch if self._rider is not None else 0

    def _dial(self, upstream: str, epoch: int) -> Stream:
        ref = self.ctx.ref(upstream, PolicyStore).within(self._patience_s)
        linked = ref.ask(PolicyStore.link, self.ctx.holder, epoch).result()
        return Stream.connect(Address.parse(linked.address), linked.ticket, self._patience_s)

    def _serve(self, link: ServingLink, stream: Stream) -> None:
        since = time.monotonic()
        try:
            link.run(stream)
        except (TransportError, RelayError) as error:
            if link.is_closed:
                return
            self.ctx.events.emit(
                "relay_link_ended",
                downstream=link.downstream,
                epoch=link.epoch,
                seconds=time.monotonic() - since,
                reason=str(error),
            )
