"""An update as a sequence of steps. Pure.

What the order keeps true:
- nothing is decoded with weights that are half new: the server is paused from before the first byte until
  after the last check;
- a server that says the new version has all of it: the version goes with the last bucket;
- the cache is never flushed by a loading call, which in SGLang up to 0.5.21 ends the server where requests
  are present; it is flushed by a call of its own where that is allowed, and in place it is kept;
- no decode step reads weights while they are written: a pause in place returns while the last step may
  still be under way on the GPU, so the GPU is waited for. The only call that waits for it computes a
  checksum; with every name left out, there is nothing else to it.
"""

from enum import StrEnum
from typing import Any

from relax_actor.engines.sglang.weights.routes import UpdateRoute


class UpdateMode(StrEnum):
    """What becomes of the requests in the server."""

    IN_PLACE = "in_place"  # they stop and go on, with the keys and values they have
    RETRACT = "retract"  # they go back to the server's queue and are prefilled anew; SGLang 0.5.21
    ABORT = "abort"  # there are none: their owner has collected them, and brings them again


class Step(StrEnum):
    """What is done to the server, in this order; those that are not needed are left out."""

    PAUSE = "pause"
    DRAIN = "drain"
    BEGIN = "begin"
    LOAD = "load"
    END = "end"
    FLUSH = "flush"
    VERSION = "version"
    CHECKSUM = "checksum"
    CONTINUE = "continue"


CALLS: dict[Step, str] = {
    Step.PAUSE: "/pause_generation",
    Step.DRAIN: "/weights_checker",
    Step.BEGIN: "/begin_weight_update",
    Step.END: "/end_weight_update",
    Step.FLUSH: "/flush_cache",
    Step.CONTINUE: "/continue_generation",
}
"""Steps of one POST each."""

SAYS_SUCCESS = frozenset({Step.DRAIN, Step.BEGIN, Step.LOAD, Step.END})
"""Steps whose answer has a field `success`."""


def plan(
    mode: UpdateMode, route: UpdateRoute, *, sessions: bool, retract: bool, verify: bool, on_gpu: bool
) -> tuple[Step, ...]:
    """Return the steps of an update.

    Args:
        mode: what becomes of requests.
        route: by which the weights come; a server that reads files needs no session for it.
        sessions: whether this SGLang asks for sessions.
        retract: whether this SGLang can flush under a `retract` pause.
        verify: whether digests are compared.
        on_gpu: whether the server's steps go on by themselves; those on a CPU have ended when it answers.

    Raises:
        ValueError: this SGLang cannot do `retract` without a stale cache.
    """
    if mode is UpdateMode.RETRACT and not retract:
        raise ValueError("this SGLang refuses to flush its cache under a `retract` pause; 0.5.21 can")
    left_out = set()
    if not sessions or route is UpdateRoute.DISK:
        left_out |= {Step.BEGIN, Step.END}
    left_out.add(Step.FLUSH if mode is UpdateMode.IN_PLACE else Step.DRAIN)
    if not on_gpu:
        left_out.add(Step.DRAIN)
    if not verify:
        left_out.add(Step.CHECKSUM)
    return tuple(step for step in Step if step not in left_out)


def body(step: Step, mode: UpdateMode) -> dict[str, Any]:
    """Return what a step of one POST sends."""
    if step is Step.PAUSE:
        return {"mode": mode.value}
    if step is Step.DRAIN:
        return {"action": "checksum", "skip_tensor_list": [""]}
    if step is Step.CONTINUE:
        return {"torch_empty_cache": False}
    return {}
