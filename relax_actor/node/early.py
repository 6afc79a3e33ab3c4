"""The short way of a death notice to a head on the same host: one datagram from the thread that felt it.

The long way (agent's loop, ZeroMQ's two threads, the head's I/O thread) passes five threads, each of which
may have to wait for a processor that is busy taking the dead apart. What is said here is said again on the
line, which loses nothing; so a datagram that finds no room is dropped.
"""

import os
import socket
from contextlib import suppress

from relax_actor.actor.wire import Record
from transport import codec


class EarlyWord:
    """The agent's end; a descriptor of -1 makes one that says nothing."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor) if descriptor >= 0 else None

    def say(self, record: Record) -> None:
        """Send a record if there is room; any thread."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(codec.encode(record), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Let the head know that no more will be said."""
        if self._socket is not None:
            self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the head's end and the agent's, which is to be inherited."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)  # noqa: FBT003 - its name says it
    return ours, theirs


def keep_from_children(descriptor: int) -> None:
    """Have no program that this process executes inherit the agent's end."""
    if descriptor >= 0:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - its name says it
