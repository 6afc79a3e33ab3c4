"""What an actor has been sent and not yet handled: bounded, in order, with credit going back.

A sender may have `CREDIT_MESSAGES` messages and `CREDIT_BYTES` bytes in a mailbox; it learns by `Credit` of
what has left it, as soon as that is half of it. So no sender can fill a mailbox for the others, and a mailbox
is full only where very many send at once.
"""

from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from relax_actor.actor.wire import Call, Credit
from transport.control import Frames

CREDIT_MESSAGES: Final = 256
"""Measured with 256 calls in flight on two busy cores: 64 makes caller and callee wait for one another, at
half the calls a second and a third more CPU a call."""

CREDIT_BYTES: Final = 16 * 2**20
MAILBOX_MESSAGES: Final = 16_384
MAILBOX_BYTES: Final = 64 * 2**20
DEAD_LETTERS_KEPT: Final = 1024


class DeadReason(StrEnum):
    """Why a message was not carried out."""

    STALE = "stale_incarnation"
    EXPIRED = "expired"
    FULL = "full"
    UNKNOWN = "unknown_method"
    CANCELLED = "cancelled"
    RUN = "run"
    ARGUMENTS = "arguments"
    RAISED = "raised"  # a tell, whose sender does not hear of it


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was not carried out."""

    reason: DeadReason
    sender: str
    method: str
    detail: str


class DeadLetters:
    """The last ones, and how many there were of each reason."""

    def __init__(self) -> None:
        self.counts: Counter[DeadReason] = Counter()
        self.last: deque[DeadLetter] = deque(maxlen=DEAD_LETTERS_KEPT)

    def add(self, reason: DeadReason, call: Call, detail: str) -> None:
        """Count a message and keep what it was."""
        self.counts[reason] += 1
        sender = f"{call.sender}#{call.sender_incarnation}"
        letter = DeadLetter(reason=reason, sender=sender, method=call.method, detail=detail[:1000])
        self.last.append(letter)


class Incoming(msgspec.Struct, eq=False):
    """A call as it came in, not yet unpacked."""

    call: Call
    frames: Frames
    peer: bytes
    expires: float  # monotonic seconds of this process
    inline_bytes: int
    is_cancelled: bool = False
    gang_breaks: int | None = None  # once it has begun: how often its gang had broken before


class Mailbox:
    """A queue between the thread that reads the sockets and the main thread.

    Args:
        on_credit: told what to give back to whom; main thread.
    """

    def __init__(self, on_credit: Callable[[bytes, Credit], None]) -> None:
        self._on_credit = on_credit
        self._waiting: deque[Incoming] = deque()
        self._bytes_in = self._bytes_out = 0  # each changed by one thread only
        self._owed: dict[bytes, tuple[int, int]] = {}  # messages and bytes

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, incoming: Incoming) -> bool:
        """Append a message; False where there is no room for it. Reading thread."""
        waiting, nbytes = len(self._waiting), self._bytes_in - self._bytes_out + incoming.inline_bytes
        if waiting >= MAILBOX_MESSAGES or (waiting and nbytes > MAILBOX_BYTES):
            return False
        self._bytes_in += incoming.inline_bytes
        self._waiting.append(incoming)
        return True

    def take(self) -> Incoming:
        """Return the oldest message, and give back the credit for it; main thread.

        Raises:
            IndexError: there is none.
        """
        incoming = self._waiting.popleft()
        self._bytes_out += incoming.inline_bytes
        messages, nbytes = self._owed.get(incoming.peer, (0, 0))
        messages, nbytes = messages + 1, nbytes + incoming.inline_bytes
        if messages >= CREDIT_MESSAGES // 2 or nbytes >= CREDIT_BYTES // 2:
            self._owed.pop(incoming.peer, None)
            self._on_credit(incoming.peer, Credit(messages=messages, bytes=nbytes))
        else:
            self._owed[incoming.peer] = messages, nbytes
        return incoming

    def find(self, peer: bytes, call_id: int) -> Incoming | None:
        """Find a message that still waits; reading thread."""
        waiting = tuple(self._waiting)  # a copy is atomic, iteration beside `take` is not
        return next((each for each in waiting if each.call.id == call_id and each.peer == peer), None)

    def forget(self, peer: bytes) -> None:
        """Owe nothing more to a sender that is gone; main thread."""
        self._owed.pop(peer, None)
