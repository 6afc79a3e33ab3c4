"""What is asked of a running head by other processes on its host, and what it passes on to other hosts.

The head's socket is in a folder that only its owner can enter. A head that is stopped or hung does not
answer; then there is nothing to see, and nothing can be ordered.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from relax_actor.actor import wire
from relax_actor.actor.wire import Look, Order, Ordered, Seen
from relax_actor.node.sight import Sight
from transport import codec
from transport.address import Address
from transport.control import Frames
from transport.errors import CodecError
from transport.zmq_control import ZmqNetwork

ANSWER_S = 2.0
"""How long all answers together may take."""

ORDER_S = 10.0
"""How long a head may take to answer an order; it is busy for less than that."""


def ask_head(address: str, looks: Sequence[Look], timeout_s: float = ANSWER_S) -> dict[int, Sight]:
    """Ask the agents of other hosts; return what they saw, by the ids of the questions.

    Args:
        address: of the head, on this host.
        looks: what to look at, each with an id of its own.
        timeout_s: for all of them; who has not answered by then is left out.
    """
    answers = asyncio.run(_Asking(looks).ask(Address.parse(address), timeout_s))
    return {
        number: msgspec.json.decode(seen.sight, type=Sight)
        for number, seen in answers.items()
        if isinstance(seen, Seen) and seen.sight
    }


def order_head(address: str, order: Order, timeout_s: float = ORDER_S) -> Ordered | None:
    """Give a head an order and return its answer; None where it does not answer.

    Args:
        address: of the head, on this host.
        order: what is to be done.
        timeout_s: how long to wait for the answer.
    """
    answer = asyncio.run(_Asking([order]).ask(Address.parse(address), timeout_s)).get(order.id)
    return answer if isinstance(answer, Ordered) else None


class _Asking:
    def __init__(self, questions: Sequence[Look] | Sequence[Order]) -> None:
        self._questions = questions
        self._open = {question.id for question in questions}
        self._answers: dict[int, Seen | Ordered] = {}
        self._all_answered = asyncio.Event()

    async def ask(self, address: Address, timeout_s: float) -> dict[int, Seen | Ordered]:
        network = ZmqNetwork()
        try:
            channel = network.connect(address, self._heard, identity=f"observer#{os.getpid()}".encode())
            for question in self._questions:
                channel.send([codec.encode(question)])
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_answered.wait(), timeout_s)
        finally:
            network.close()
        return self._answers

    def _heard(self, frames: Frames) -> None:
        with suppress(CodecError, msgspec.MsgspecError):
            answer = wire.decode(frames[0])
            if isinstance(answer, Seen | Ordered) and answer.id in self._open:
                self._open.discard(answer.id)
                self._answers[answer.id] = answer
        if not self._open:
            self._all_answered.set()
