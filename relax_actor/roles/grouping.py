"""The group of a run's stores, as actors: who asks store-0 for a seat, and in which threads it goes on.

torch, which carries a group, is imported here by stores of runs whose `dcs.relay` is `group`, in a thread:
until it is there, versions come along the chain.
"""

import importlib
import threading
from collections.abc import Callable
from typing import Any

from relax_actor.actor import endpoint
from relax_actor.actor.store import open_store
from relax_actor.dcs.relay.carrier import DEADLINE_S, GlooCarrier
from relax_actor.dcs.relay.group import Seat
from relax_actor.dcs.relay.intake import Intake
from relax_actor.dcs.relay.leading import Leader
from relax_actor.dcs.relay.riding import Rider
from relax_actor.dcs.store import HostStore
from relax_actor.ids import Holder
from relax_actor.roles.staging import StagingActor


class GroupingActor(StagingActor):
    """An actor that leads groups of stores, or rides in them."""

    leader: Leader | None = None
    failure: BaseException | None = None
    """What ended a thread of this actor, and is to end the actor."""

    @endpoint(timeout_s=DEADLINE_S, idempotent=True)
    def seat(self, holder: Holder, have: int) -> Seat | None:
        """Take note that a store asks for a seat in a group; give it the one it has.

        Args:
            holder: who asks.
            have: the newest version it has, or refuses; -1 is none.
        """
        return None if self.leader is None else self.leader.seat(holder, have)

    @property
    def host(self) -> str:
        """The address by which other stores reach this one."""
        return self.ctx.listen or "127.0.0.1"

    def start_leading(self, store: HostStore, names: tuple[str, ...]) -> None:
        """Lead the groups of the stores of these names."""

        def join(seat: Seat, meeting: Any) -> GlooCarrier:
            return GlooCarrier(seat, self.host, meeting)

        self.leader = leader = Leader(
            store,
            self.ctx.holder,
            names,
            self.ctx.events.emit,
            open_meeting=lambda: open_store(self.host),
            join=join,
        )
        self._leading = self.in_thread("leader", leader.run)

    def stop_leading(self, within_s: float) -> None:
        """End the group in order, if this actor leads one."""
        if self.leader is not None:
            self.leader.close()
            self._leading.join(within_s)

    def make_rider(self, intake: Intake, lead: str, retry_s: float) -> Rider:
        """Return what rides in the groups of `lead`."""
        is_ready = threading.Event()

        def prepare() -> None:
            importlib.import_module("torch.distributed")
            is_ready.set()

        def ask(have: int) -> Seat | None:
            if not is_ready.is_set():
                return None
            ref = self.ctx.ref(lead, GroupingActor).within(DEADLINE_S)
            return ref.ask(GroupingActor.seat, self.ctx.holder, have).result()

        self.in_thread("torch", prepare)
        return Rider(intake, ask, lambda seat: GlooCarrier(seat, self.host), retry_s=retry_s)

    def in_thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Do work in a thread whose failure is the actor's."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it ends the actor; see `PolicyStore.step`
                self.failure = error
                self.ctx.wake()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread
