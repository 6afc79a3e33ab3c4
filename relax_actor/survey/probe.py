"""`python -P -m relax_actor.survey.probe FD`: answer one question, try to reach other hosts, end.

It is started by `relax_actor.node.porter`, in the surroundings that actors would have. It reads frames from
standard input and writes records of `node.inband` to the descriptor that its argument names. Nothing stays.
"""

import os
import signal
import sys

import msgspec

from relax_actor.node.inband import Answered, framed
from relax_actor.survey.host import facts_of
from relax_actor.survey.records import Facts, Question, Reached, Targets
from relax_actor.survey.wires import Listener, reached

_LENGTH_BYTES = 4


def main(descriptor: int) -> None:
    """Serve one session."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    question = msgspec.msgpack.decode(_frame(), type=Question)
    listener = _listener(question)
    try:
        _say(descriptor, facts_of(question, port=listener.port if listener is not None else 0))
        if body := _frame():
            _say(descriptor, reached(msgspec.msgpack.decode(body, type=Targets)))
            _frame()  # who listens stays until everybody has tried
    finally:
        if listener is not None:
            listener.close()


def _listener(question: Question) -> Listener | None:
    try:
        return Listener(question.ports) if question.listens else None
    except OSError:  # no port of the range is free: whoever tries will say so
        return None


def _say(descriptor: int, answer: Facts | Reached) -> None:
    view = memoryview(framed(Answered(body=msgspec.msgpack.encode(answer))))
    while view:
        view = view[os.write(descriptor, view) :]


def _frame() -> bytes:
    """Return the next frame; empty where the head has let go."""
    length = int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES), "little")
    return sys.stdin.buffer.read(length) if length else b""


if __name__ == "__main__":
    main(int(sys.argv[1]))
