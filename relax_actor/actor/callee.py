"""What the parts of a courier ask of the process that they carry calls to."""

from typing import Any

from relax_actor.actor.mailbox import Incoming


class Callee:
    """A process that takes no calls; one that does overrides this. With the courier's lock held."""

    def started(self) -> None:
        """Begin, before the sockets are bound; I/O thread."""

    def take(self, incoming: Incoming) -> bool:
        """Put a call into the mailbox; False where it is full."""
        del incoming
        return False

    def cancel(self, peer: bytes, call_id: int) -> None:
        """Do not start a call, or stop it."""

    def is_open(self, peer: bytes, call_id: int) -> bool:
        """Whether a call is here and not answered."""
        del peer, call_id
        return False

    def answer(self, what: str) -> Any:
        """Answer a question about the process."""
        raise KeyError(what)

    def reply_ended(self) -> None:
        """Learn that a call that this process made has ended; without the lock."""

    def main_ident(self) -> int | None:
        """Return the thread that handles messages, if there is one."""
        return None
