"""What a process knows of an actor that it calls, and of each call to it that has not ended."""

import time
from collections import deque
from typing import Any

import msgspec

from relax_actor.actor.bulk import Staged
from relax_actor.actor.mailbox import CREDIT_BYTES, CREDIT_MESSAGES
from relax_actor.actor.ref import Reply
from relax_actor.actor.wire import Call, Credit, Dying, Failed, Result
from relax_actor.errors import ActorError, CallTimeout, Executed
from relax_actor.ids import Holder
from transport.control import Channel, Frames


class Pending(msgspec.Struct, eq=False):
    """A call that has not ended."""

    name: str
    method: str
    payload: Staged
    deadline: float
    timeout_s: float
    idempotent: bool
    pinned: int | None
    reply: Reply[Any]
    returns: Any
    wants_reply: bool
    query: str = ""  # answered by the I/O thread; takes no credit
    id: int = 0
    sent_to: int | None = None  # incarnation

    def record(self, sender: Holder, run_id: str, incarnation: int, *, is_local: bool) -> Call:
        """Return what is sent to an incarnation of the callee, on this host or another."""
        return Call(
            id=self.id,
            method=self.method,
            run_id=run_id,
            sender=sender.name,
            sender_incarnation=sender.incarnation,
            to_incarnation=incarnation,
            budget_s=max(0.0, self.deadline - time.monotonic()),
            until_s=self.deadline if is_local else 0.0,
            wants_reply=self.wants_reply,
            body=self.payload.body,
            bulk=self.payload.refs,
        )

    def timeout(self, *, is_up: bool) -> CallTimeout:
        """Return the error of a deadline that passed; `is_up` says whether the callee is there now."""
        if self.sent_to is not None:
            detail, executed = "it was delivered", Executed.MAYBE
        else:
            reason = "did not read the messages before it" if is_up else "did not come up"
            detail, executed = f"{self.name} {reason}", Executed.NO
        return CallTimeout(self.name, self.method, self.timeout_s, executed, detail)


class Ended(msgspec.Struct, eq=False):
    """How a call ended: an error, what the callee said, or nothing, for a message that was sent."""

    pending: Pending
    error: ActorError | None = None
    answer: Result | Failed | None = None
    frames: Frames = ()


class Peer:
    """What this process knows of another actor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dying: Dying | None = None  # nothing more is sent; a reply may still be on its way
        self.last_dead = 0  # incarnation
        self.is_local = True  # shares our shared memory
        self.incarnation: int | None = None
        self.channel: Channel | None = None
        self.waiting: deque[Pending] = deque()
        self.in_flight: dict[int, Pending] = {}
        self.is_retrying = False
        self.new_credit()

    @property
    def holder(self) -> str:
        """The incarnation that is up, as it names itself."""
        return f"{self.name}#{self.incarnation}"

    def new_credit(self) -> None:
        """Begin with an empty mailbox."""
        self.messages, self.unread_bytes = CREDIT_MESSAGES, 0

    def has_credit(self, nbytes: int) -> bool:
        """Whether a message may be sent now; the largest ones wait until all others are read."""
        fits = not self.unread_bytes or self.unread_bytes + nbytes <= CREDIT_BYTES
        return self.messages > 0 and fits

    def status(self) -> dict[str, int]:
        """Return how many calls are in flight and how many wait, and what credit is left."""
        return {
            "in_flight": len(self.in_flight),
            "waiting": len(self.waiting),
            "credit_messages": self.messages,
            "unread_bytes": self.unread_bytes,
        }

    def credit(self, given: Credit) -> None:
        """Take back credit."""
        self.messages = min(CREDIT_MESSAGES, self.messages + given.messages)
        self.unread_bytes = max(0, self.unread_bytes - given.bytes)
