"""Named points where tests and the kill demo make a process die, stop or fail.

A plan is a list of `Fault`s in the environment variable `RELAX_ACTOR_FAULTS` (JSON). Without one,
`point` costs a dictionary look-up in an empty dictionary. Points so far, in the order of a group's life:
leased, submitted, first_token, finished, chunk_written, chunk_sent, tensors_written, ready_sent; of rows
that travel parcel_sent (by the producer), part_taken (by the dock, which awaits more of the parcel),
parcel_written and parcel_docked (by the dock, without and with a name), rows_given (read for another host,
not sent);
falling_asleep, asleep and waking (a rollout that takes turns on a GPU);
rewarding, reward_sent, batch_leased, turn_taken, trained, offloaded, turn_given_up (when rollouts may wake),
publish_bucket, publish_manifest, publish_latest, acknowledged,
verify_bucket,
install_bucket, install_copied (all is in place and nothing read back), policy_lent (a part, by the lender);
in stores stage_chunk (is on its way to a GPU), relay_offer, relay_chunk (which LOSE fills with zeros),
store_bucket, store_manifest, store_latest, group_sent (a piece, by the lead; LOSE as before), group_piece;
of a row queue rows_written, rows_sent (the producer), rows_adopted, rows_decided, rows_committed, rows_put,
fields_put, rows_leased, rows_acked (the queue), rows_got, rows_done (the consumer);
checkpoint_file, checkpoint_manifest, checkpoint_rename; in the queue queue_decided (nothing is written
down yet), queue_committed (nobody is told yet), queue_answered, spilling (a file is unfinished) and spilled
(its rows are in memory too); in the prompts actor prompts_written; in a rollout with SGLang sglang_pause,
sglang_drain, _begin, _load, _end, _flush, _version, _checksum and _continue (before each step of an update)
and sglang_bucket (one is on its way); in a part of a replica part_asked (no server is started yet).
"""

import os
import signal
import threading
import time
from enum import StrEnum

import msgspec

VARIABLE = "RELAX_ACTOR_FAULTS"


class Action(StrEnum):
    """What happens to the process at the point."""

    KILL = "kill"  # SIGKILL, at once
    STOP = "stop"  # SIGSTOP: it hangs, alive
    EXIT = "exit"  # leaves without clean-up, exit code 7
    RAISE = "raise"  # an exception in user code
    REFUSE = "refuse"  # a ValueError, as from an engine that can never sample a prompt
    LOSE = "lose"  # what was to be handed on at the point is lost
    DELAY = "delay"  # sleeps `seconds`


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Do `action` when `actor` reaches `point` for the `nth` time in that incarnation."""

    actor: str
    point: str
    action: Action = Action.KILL
    incarnation: int = 1
    nth: int = 1
    seconds: float = 0.0


class InjectedFaultError(Exception):
    """What `Action.RAISE` raises."""


_armed: dict[str, list[Fault]] = {}
_reached: dict[str, int] = {}


def plan(faults: list[Fault]) -> dict[str, str]:
    """Return the environment that arms `faults` in the processes started with it."""
    return {VARIABLE: msgspec.json.encode(faults).decode()}


def arm(actor: str, incarnation: int) -> None:
    """Arm what the environment plans for this incarnation of this actor."""
    _armed.clear()
    _reached.clear()
    text = os.environ.get(VARIABLE, "")
    for fault in msgspec.json.decode(text, type=list[Fault]) if text else []:
        if (fault.actor, fault.incarnation) == (actor, incarnation):
            _armed.setdefault(fault.point, []).append(fault)


def point(name: str) -> bool:
    """Mark that the process has come to `name`; do what is planned there.

    Returns:
        Whether the caller is to lose what it has in hand; only points that say so heed it.
    """
    faults = _armed.get(name)
    if faults is None:
        return False
    _reached[name] = _reached.get(name, 0) + 1
    due = [fault for fault in faults if fault.nth == _reached[name]]
    for fault in due:
        _strike(fault)
    return any(fault.action is Action.LOSE for fault in due)


def _strike(fault: Fault) -> None:
    if fault.action is Action.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action is Action.STOP:
        # Sent to the process, it would be taken by the main thread, and this one would go on until then.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif fault.action is Action.EXIT:
        os._exit(7)
    elif fault.action is Action.DELAY:
        time.sleep(fault.seconds)
    elif fault.action is Action.REFUSE:
        raise ValueError(f"injected at {fault.point}")
    elif fault.action is Action.RAISE:
        raise InjectedFaultError(f"injected at {fault.point}")
