"""The life of the engine `sglang` as a printable table; docs/concepts/sglang.md prints it."""

from enum import StrEnum

from relax_actor.errors import RelaxError


class EngineState(StrEnum):
    """What the server and its weights are."""

    DOWN = "down"  # no server, or one that was killed
    STARTING = "starting"  # its process runs and does not serve yet
    UNSYNCED = "unsynced"  # it serves, with weights that are no policy's
    READY = "ready"  # a whole policy version is installed
    UPDATING = "updating"  # its weights are being replaced
    ASLEEP = "asleep"  # its memory is given to somebody else


class EngineTrigger(StrEnum):
    """What moves the engine on."""

    START = "start"  # a process was started
    UP = "up"  # it answers, and what it can do is known
    UPDATE = "update"  # the first call of an update is about to be made
    WHOLE = "whole"  # all weights are in, and the server says the version
    UNTOUCHED = "untouched"  # the source failed before the server was told of anything
    INVALID = "invalid"  # what was installed is not what was published
    SLEEP = "sleep"
    WAKE = "wake"
    DOUBT = "doubt"  # anything failed: the server is killed, whatever it was doing


class IllegalEngineMoveError(RelaxError):
    """The engine was to be moved in a way the table does not have: a bug.

    Args:
        state: where it is, and stays.
        trigger: what was to move it.
    """

    def __init__(self, state: EngineState, trigger: EngineTrigger) -> None:
        self.state, self.trigger = state, trigger
        super().__init__(f"an engine that is {state} has no move `{trigger}`")


TABLE: dict[tuple[EngineState, EngineTrigger], EngineState] = {
    (EngineState.DOWN, EngineTrigger.START): EngineState.STARTING,
    (EngineState.STARTING, EngineTrigger.UP): EngineState.UNSYNCED,
    (EngineState.UNSYNCED, EngineTrigger.UPDATE): EngineState.UPDATING,
    (EngineState.READY, EngineTrigger.UPDATE): EngineState.UPDATING,
    (EngineState.UPDATING, EngineTrigger.WHOLE): EngineState.READY,
    (EngineState.UPDATING, EngineTrigger.UNTOUCHED): EngineState.UNSYNCED,
    (EngineState.READY, EngineTrigger.INVALID): EngineState.UNSYNCED,
    (EngineState.UNSYNCED, EngineTrigger.INVALID): EngineState.UNSYNCED,
    (EngineState.UNSYNCED, EngineTrigger.SLEEP): EngineState.ASLEEP,
    (EngineState.READY, EngineTrigger.SLEEP): EngineState.ASLEEP,
    (EngineState.ASLEEP, EngineTrigger.WAKE): EngineState.UNSYNCED,
    **{(state, EngineTrigger.DOUBT): EngineState.DOWN for state in EngineState if state != EngineState.DOWN},
}


def move(state: EngineState, trigger: EngineTrigger) -> EngineState:
    """Return the state that follows.

    Raises:
        IllegalEngineMoveError: the table has no such move.
    """
    if (state, trigger) not in TABLE:
        raise IllegalEngineMoveError(state, trigger)
    return TABLE[state, trigger]


def diagram() -> str:
    """Return the moves as a Mermaid state diagram."""
    arrows = [f"    {state} --> {after}: {trigger}" for (state, trigger), after in TABLE.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {EngineState.DOWN}", *arrows])
