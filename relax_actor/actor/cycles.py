"""Who waits for whom in a circle; pure.

An actor whose main thread waits in `Reply.result` handles no message. So where the callee waits in turn, and
its callee, and the last of them for the first, none is ever answered. A wait that lasts sends a probe after
the call (Chandy, Misra, Haas 1983, "Distributed deadlock detection", the single-resource model): each actor
that waits itself sends it on after its own call, and if it comes back to the wait that it began with, that is
a circle. It is exact: a probe goes on only where the call it follows is open at its receiver, and a main
thread that waits cannot end it meanwhile. Nothing is sent for calls that are answered soon.
"""

from typing import Final

import msgspec

from relax_actor.actor.wire import Probe
from relax_actor.ids import Holder

PROBE_AFTER_S: Final = 0.02
"""How long a wait lasts before it is worth a question."""

PROBE_AGAIN_S: Final = 1.0
"""The wait that closes a circle finds it; asking again is for probes that met a full channel."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The main thread waits for this call's answer."""

    callee: str
    call_id: int


class Circle(msgspec.Struct, frozen=True):
    """The chain of names, from this actor round to itself."""

    chain: tuple[str, ...]


def begin(me: Holder, wait: Wait) -> Probe:
    """Return the probe that a wait sends after its call."""
    return Probe(origin=str(me), wait_id=wait.call_id, call_id=wait.call_id, chain=(me.name,))


def follow(probe: Probe, me: Holder, wait: Wait | None, *, is_open: bool) -> Circle | Probe | None:
    """Decide what a probe that came in means.

    Args:
        probe: it follows a call to this actor.
        me: this actor.
        wait: what its main thread waits for, if it does.
        is_open: whether the call is here and not yet answered.

    Returns:
        A circle that this actor is to break, a probe to send after the call of `wait`, or nothing.
    """
    if wait is None or not is_open:
        return None
    if probe.origin == str(me):
        return Circle((*probe.chain, me.name)) if probe.wait_id == wait.call_id else None
    if me.name in probe.chain:  # a circle without the origin: those in it find it themselves
        return None
    return msgspec.structs.replace(probe, call_id=wait.call_id, chain=(*probe.chain, me.name))
