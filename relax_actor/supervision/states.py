"""The life of a child as a printable table; actors and supervisors go through the same states.

The policy moves a child by this table only, and docs/concepts/supervision.md prints it.
"""

from enum import StrEnum

from relax_actor.errors import RelaxError


class ChildState(StrEnum):
    """Where a child is in its life."""

    DOWN = "down"  # not running, may be started by its supervisor
    STARTING = "starting"  # spawned, not ready yet
    READY = "ready"
    STOPPING = "stopping"  # told to stop, or over its time to start; not gone yet
    BACKING_OFF = "backing_off"  # failed; will be started when its delay is over
    AWAITING = "awaiting"  # failed; `on_failure` is being asked what to do
    ENDED = "ended"  # over by itself, and its restart type says to leave it


class Trigger(StrEnum):
    """What moves a child on."""

    START = "start"
    READY = "ready"
    STOP = "stop"
    GIVE_UP = "give_up"  # it failed while it still runs: __init__ raised, time is over, it hangs
    GONE = "gone"
    BACK_OFF = "back_off"
    DELAY_OVER = "delay_over"
    END = "end"
    ASK = "ask"  # let `on_failure` decide
    DECIDED = "decided"
    RESET = "reset"  # a sibling's failure restarts it although it had ended


class IllegalMoveError(RelaxError):
    """A child was to be moved in a way the table does not have: a bug in the policy.

    Args:
        state: where the child is, and stays.
        trigger: what was to move it.
    """

    def __init__(self, state: ChildState, trigger: Trigger) -> None:
        self.state, self.trigger = state, trigger
        super().__init__(f"a child that is {state} has no move `{trigger}`")


TABLE: dict[tuple[ChildState, Trigger], ChildState] = {
    (ChildState.DOWN, Trigger.START): ChildState.STARTING,
    (ChildState.DOWN, Trigger.BACK_OFF): ChildState.BACKING_OFF,
    (ChildState.DOWN, Trigger.END): ChildState.ENDED,
    (ChildState.STARTING, Trigger.READY): ChildState.READY,
    (ChildState.STARTING, Trigger.GIVE_UP): ChildState.STOPPING,
    (ChildState.STARTING, Trigger.STOP): ChildState.STOPPING,
    (ChildState.STARTING, Trigger.GONE): ChildState.DOWN,
    (ChildState.READY, Trigger.GIVE_UP): ChildState.STOPPING,
    (ChildState.READY, Trigger.STOP): ChildState.STOPPING,
    (ChildState.READY, Trigger.GONE): ChildState.DOWN,
    (ChildState.STOPPING, Trigger.GONE): ChildState.DOWN,
    (ChildState.BACKING_OFF, Trigger.DELAY_OVER): ChildState.DOWN,
    (ChildState.BACKING_OFF, Trigger.STOP): ChildState.DOWN,
    (ChildState.DOWN, Trigger.ASK): ChildState.AWAITING,
    (ChildState.AWAITING, Trigger.DECIDED): ChildState.DOWN,
    (ChildState.AWAITING, Trigger.STOP): ChildState.DOWN,
    (ChildState.ENDED, Trigger.RESET): ChildState.DOWN,
}

ALIVE = frozenset({ChildState.STARTING, ChildState.READY, ChildState.STOPPING})
"""The states in which there is something to stop and to wait for."""

SETTLED = frozenset({ChildState.READY, ChildState.ENDED})
"""The states in which a child no longer keeps the next one from starting."""


def move(state: ChildState, trigger: Trigger) -> ChildState:
    """Return the state that follows.

    Raises:
        IllegalMoveError: the table has no such move.
    """
    try:
        return TABLE[state, trigger]
    except KeyError:
        raise IllegalMoveError(state, trigger) from None


def table() -> str:
    """Return the moves as a Markdown table, one row a move."""
    rows = [f"| {state} | {trigger} | {after} |" for (state, trigger), after in TABLE.items()]
    return "\n".join(["| State | Trigger | Next state |", "|---|---|---|", *rows])


def diagram() -> str:
    """Return the moves as a Mermaid state diagram."""
    arrows = [f"    {state} --> {after}: {trigger}" for (state, trigger), after in TABLE.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {ChildState.DOWN}", *arrows])
