"""What is left of a journal when its past is forgotten: the events that make a state anew. Pure."""

from collections.abc import Iterator

from relax_actor.row_queue.records import (
    Event,
    Fenced,
    PutBy,
    RowsGone,
    RowsLeased,
    SeqSeen,
    Settled,
    StreamEnded,
    TurnDealt,
)
from relax_actor.row_queue.sampling import GroupsReady
from relax_actor.row_queue.state import TableState
from relax_actor.row_queue.turns import TokensReady


def snapshot(state: TableState) -> list[Event]:
    """Return events that make a state anew, without its past."""
    return [
        *(Fenced(name, incarnation) for name, incarnation in state.fenced.items()),
        RowsGone(state.next_row),
        *_rows(state),
        *_settled(state),
        *_leases(state),
        *_turns(state),
        *_puts(state),
        *([StreamEnded()] if state.is_ended else []),
    ]


def _rows(state: TableState) -> Iterator[Event]:
    yield from state.rows.shared.events()
    for extent in state.rows.extents():
        yield from extent.events()


def _settled(state: TableState) -> Iterator[Event]:
    for name, group in state.groups.items():
        settled = state.rows.settled_rows(name)
        wanted = dict(group.ready.wanted) if isinstance(group.ready, GroupsReady) else {}
        yield Settled(name, settled, group.acked, group.dropped, dict(group.failures), wanted)


def _leases(state: TableState) -> Iterator[Event]:
    """Yield the loans before the turns, or one could be taken for the next share of its rank."""
    for lease_id, lease in state.leases.items():
        yield RowsLeased(lease_id, lease.group, lease.holder, lease.rows, lease.until_s, lease.rank)


def _turns(state: TableState) -> Iterator[Event]:
    for name, group in state.groups.items():
        if isinstance(group.ready, TokensReady):
            yield from (TurnDealt(name, shares) for shares in group.ready.turns())


def _puts(state: TableState) -> Iterator[Event]:
    yield from (PutBy(name, rows) for name, rows in state.put_by.items())
    for producer, seen in state.seen.items():
        yield from (SeqSeen(producer, seq, first) for seq, first in seen.items())
