"""The TransferQueue's ledger: who has which samples of which prompt, and what became of them.

A pure state machine: no I/O, no threads, and time is handed in. A method of `Ledger` decides on events,
applies them and keeps them for the journal; `Ledger.replay` of those events is the same ledger.

What always holds:

- I2: submitted == trained + dropped + running + queued, after every event.
- I3: no sample is dealt to a trainer more than `max_staleness` versions ahead of its oldest token.
- I4: a rollout gets prompts only for the newest version, which it says it has installed.
- I7: versions never go back, and what an older incarnation sends is refused.
- A group is trained at most once, and with everybody alive every batch comes in the end.
- A segment is freed exactly when no row needs it any more.

Read `groups` (a sample's states), `records` (the events), `machine` (the decisions), `selection` (which
groups make a batch), `fold` (what an event does) and `rewind` (a trainer comes back from a checkpoint).

Refused: leases of single rows to several rollouts (a prompt's prefix is computed where its group is);
accepting a late sample of a lease that ended (two rollouts would race for one row); keeping samples over a
rewind (their weights are gone); counting invariants by scanning (they would agree with any bug).
"""

from relax_actor.transfer_queue.ledger.machine import Ledger
from relax_actor.transfer_queue.rules import LedgerConfig

__all__ = ["Ledger", "LedgerConfig"]
