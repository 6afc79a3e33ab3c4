"""The life of a row, as each consumer group sees it, as a printable table.

docs/concepts/transfer_queue.md prints it, and a model-based test finds no row that moves in another way.
"""

from enum import StrEnum


class RowState(StrEnum):
    """Where a row is for a group."""

    ABSENT = "absent"  # not put
    INCOMPLETE = "incomplete"  # the group waits for a field of it
    READY = "ready"  # it can be dealt, alone or with the rest of its group or turn
    LEASED = "leased"  # a consumer has it
    SETTLED = "settled"  # acknowledged or dropped: the group is done with it


class RowTrigger(StrEnum):
    """What moves a row on."""

    PUT = "put"  # with some of the fields that the group needs
    PUT_WHOLE = "put whole"  # with all of them
    FIELDS = "fields"  # the last of them
    LEASE = "lease"
    OVER = "over"  # the lease ended: by its deadline, a death, or an answer that got lost
    ACK = "ack"
    DROP = "drop"  # asked for, poison, or in a group that is never whole


TABLE: dict[tuple[RowState, RowTrigger], RowState] = {
    (RowState.ABSENT, RowTrigger.PUT): RowState.INCOMPLETE,
    (RowState.ABSENT, RowTrigger.PUT_WHOLE): RowState.READY,
    (RowState.INCOMPLETE, RowTrigger.FIELDS): RowState.READY,
    (RowState.INCOMPLETE, RowTrigger.DROP): RowState.SETTLED,
    (RowState.READY, RowTrigger.LEASE): RowState.LEASED,
    (RowState.READY, RowTrigger.DROP): RowState.SETTLED,
    (RowState.LEASED, RowTrigger.OVER): RowState.READY,
    (RowState.LEASED, RowTrigger.ACK): RowState.SETTLED,
    (RowState.LEASED, RowTrigger.DROP): RowState.SETTLED,
}


def diagram() -> str:
    """Return the moves as a Mermaid state diagram."""
    arrows = [f"    {state} --> {after}: {trigger}" for (state, trigger), after in TABLE.items()]
    ends = [f"    [*] --> {RowState.ABSENT}", *arrows, f"    {RowState.SETTLED} --> [*]"]
    return "\n".join(["stateDiagram-v2", *ends])
