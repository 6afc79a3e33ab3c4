"""What the queue's event log says of its ledger."""

import msgspec

from relax_actor.ids import Holder
from relax_actor.telemetry import EventLog
from relax_actor.transfer_queue.ledger import Ledger
from relax_actor.transfer_queue.records import DroppedGroup, Expired, Put

LONG_WAIT_S = 10.0
"""From here on a waiting trainer is worth a line in the log."""


class QueueNews:
    """Writes events.

    Args:
        events: the actor's log.
        ledger: whose news it is.
    """

    def __init__(self, events: EventLog, ledger: Ledger) -> None:
        self._events, self._ledger = events, ledger
        self.trainer_waits_since: float | None = None  # seconds of the queue's clock

    def say_expired(self, each: Expired) -> None:
        """Say whose lease ran out."""
        self._events.emit(
            "lease_expired",
            lease_kind=each.kind,  # an event has a kind of its own
            lease_id=each.lease_id,
            holder=each.holder,
            group_ids=each.group_ids,
        )

    def say_dropped(self) -> None:
        """Say what was dropped since the last call."""
        for dropped in self._ledger.take_dropped():
            kind = "group_dropped" if isinstance(dropped, DroppedGroup) else "sample_dropped"
            self._events.emit(kind, **msgspec.to_builtins(dropped))

    def say_what_is_awaited(self, now: float) -> None:
        """Say why the trainer waits, once each time that it waits for long."""
        since = self.trainer_waits_since
        if since is not None and now - since >= LONG_WAIT_S:
            self.trainer_waits_since = None
            self._events.emit("trainer_waits", reason=self._ledger.waiting_on())

    def say_refused(self, holder: Holder, what: str, outcomes: list[Put]) -> None:
        """Say what was not taken."""
        if outcomes.count(Put.ACCEPTED) == len(outcomes):
            return
        refused = {put.value: outcomes.count(put) for put in Put if put is not Put.ACCEPTED}
        self._events.emit(
            "put_refused", sender=holder.name, incarnation=holder.incarnation, what=what, **refused
        )

    def say_accounting(self) -> None:
        """Say where all samples are."""
        accounting = self._ledger.accounting()
        self._events.emit("ledger", **msgspec.structs.asdict(accounting), balances=accounting.balances)
