"""The life of a replica's weights as a printable table; docs/concepts/dcs.md prints it."""

from enum import StrEnum

from relax_actor.errors import RelaxError


class WeightsState(StrEnum):
    """What a replica's weights are."""

    EMPTY = "empty"  # none since the process started; nothing is sampled
    SERVING = "serving"  # a whole version, read back and found to be what was published
    WAITING = "waiting"  # whole, but older than the newest, which is verified or waits for a turn or a loan
    INSTALLING = "installing"  # being overwritten between two decode steps
    TORN = "torn"  # of more than one version; nothing is sampled
    FAILED = "failed"  # no route brought a version; the process ends and its next incarnation is empty


class WeightsTrigger(StrEnum):
    """What moves a replica's weights on."""

    COPY = "copy"  # a source has opened a version, and its first tensor is about to be copied
    WHOLE = "whole"  # all of it is in place, and what was read back is what was published
    BROKEN = "broken"  # the source failed half way, or what was read back differs
    NEWER = "newer"  # a newer version is there, and may not be installed yet
    NO_ROUTE = "no_route"
    ASLEEP = "asleep"  # the engine has given their memory to somebody else


class IllegalWeightsMoveError(RelaxError):
    """A replica's weights were to be moved in a way the table does not have: a bug.

    Args:
        state: where they are, and stay.
        trigger: what was to move them.
    """

    def __init__(self, state: WeightsState, trigger: WeightsTrigger) -> None:
        self.state, self.trigger = state, trigger
        super().__init__(f"weights that are {state} have no move `{trigger}`")


TABLE: dict[tuple[WeightsState, WeightsTrigger], WeightsState] = {
    (WeightsState.EMPTY, WeightsTrigger.COPY): WeightsState.INSTALLING,
    (WeightsState.SERVING, WeightsTrigger.NEWER): WeightsState.WAITING,
    (WeightsState.SERVING, WeightsTrigger.COPY): WeightsState.INSTALLING,
    (WeightsState.WAITING, WeightsTrigger.COPY): WeightsState.INSTALLING,
    (WeightsState.INSTALLING, WeightsTrigger.WHOLE): WeightsState.SERVING,
    (WeightsState.INSTALLING, WeightsTrigger.BROKEN): WeightsState.TORN,
    (WeightsState.TORN, WeightsTrigger.COPY): WeightsState.INSTALLING,
    **{
        (state, WeightsTrigger.ASLEEP): WeightsState.EMPTY
        for state in (WeightsState.EMPTY, WeightsState.SERVING, WeightsState.WAITING, WeightsState.TORN)
    },
    (WeightsState.EMPTY, WeightsTrigger.NO_ROUTE): WeightsState.FAILED,
    (WeightsState.TORN, WeightsTrigger.NO_ROUTE): WeightsState.FAILED,
}

SAMPLING = frozenset({WeightsState.SERVING, WeightsState.WAITING})
"""The states in which there is something to sample from."""


def move(state: WeightsState, trigger: WeightsTrigger) -> WeightsState:
    """Return the state that follows.

    Raises:
        IllegalWeightsMoveError: the table has no such move.
    """
    try:
        return TABLE[state, trigger]
    except KeyError:
        raise IllegalWeightsMoveError(state, trigger) from None


def diagram() -> str:
    """Return the moves as a Mermaid state diagram."""
    arrows = [f"    {state} --> {after}: {trigger}" for (state, trigger), after in TABLE.items()]
    ends = [f"    [*] --> {WeightsState.EMPTY}", *arrows, f"    {WeightsState.FAILED} --> [*]"]
    return "\n".join(["stateDiagram-v2", *ends])
