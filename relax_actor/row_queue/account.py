"""What can be asked about the rows of a queue: where they are, who needs what. Pure."""

from collections.abc import Iterator

from relax_actor.ids import GroupId
from relax_actor.protocol import TensorRef
from relax_actor.row_queue.records import each
from relax_actor.row_queue.state import GroupState, TableState
from relax_actor.row_queue.states import RowState


class Account:
    """See the module; a table is one.

    Args:
        state: which is looked at.
    """

    def __init__(self, state: TableState) -> None:
        self._state = state

    def rows_put_by(self, name: str) -> int:
        """Return how many rows all incarnations of a producer have put."""
        return self._state.put_by[name]

    @property
    def resident_rows(self) -> int:
        """How many rows are here."""
        return self._state.rows.count

    @property
    def is_held_back(self) -> bool:
        """Whether rows are here that nobody can be given until further ones come."""
        if self._state.leases:
            return False
        ready = [state.ready for state in self._state.groups.values()]
        is_end = self._state.is_ended
        return any(each.count for each in ready) and not any(
            each.is_on_offer(is_end=is_end) for each in ready
        )

    def progress(self, group: str) -> dict[str, int]:
        """Where all rows ever put are for a group: `put` is the sum of the others.

        Raises:
            ValueError: no such group.
        """
        state, rows = self._group(group, 0), self._state.rows
        leased = sum(
            not rows.is_settled(row, group)
            for lease in self._state.leases.values()
            if lease.group == group
            for row in each(lease.rows)
        )
        known = state.acked + state.dropped + leased + state.ready.count
        return {
            "put": self._state.next_row,
            "acked": state.acked,
            "dropped": state.dropped,
            "leased": leased,
            "ready": state.ready.count,
            "incomplete": self._state.next_row - known,
        }

    @property
    def is_finished(self) -> bool:
        """Whether the stream has ended and every group is done with every row."""
        return self._state.is_ended and not self._state.rows.count

    def segments(self) -> set[str]:
        """Return every segment that is needed."""
        return self._state.rows.segments()

    def needs(self, segment: str) -> bool:
        """Whether a segment is needed."""
        return self._state.rows.needs(segment)

    def holdings(self) -> Iterator[tuple[GroupId, TensorRef]]:
        """Yield every array that is needed, and the first of its rows, which are served in that order."""
        for extent in self._state.rows.extents():
            for spans in extent.spans.values():
                for span in spans:
                    yield GroupId(span.low), span.column.ref()
        for first, columns in self._state.rows.shared.holdings():
            for column in columns.values():
                yield GroupId(first), column.ref()

    def state_of(self, row: int, group: str) -> RowState:
        """Say where one row is for a group.

        Raises:
            ValueError: no such group.
        """
        state = self._group(group, 0)
        if row >= self._state.next_row:
            return RowState.ABSENT
        if self._state.rows.is_settled(row, group):
            return RowState.SETTLED
        lent = (span for lease in self._state.leases.values() if lease.group == group for span in lease.rows)
        if any(low <= row < high for low, high in lent):
            return RowState.LEASED
        return RowState.READY if self._state.rows.has(row, state.mask) else RowState.INCOMPLETE

    def _group(self, name: str, rank: int) -> GroupState:
        state = self._state.groups.get(name)
        if state is None:
            raise ValueError(f"no consumer group {name!r}; there are {', '.join(self._state.groups)}")
        ranks = getattr(state.spec.sampler, "ranks", 1)
        if not 0 <= rank < ranks:
            raise ValueError(f"no rank {rank}; {name!r} has {ranks}")
        return state
