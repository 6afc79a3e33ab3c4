"""What the node agents of other hosts see of their actors, asked of the head, which passes it on.

The head's socket is in a folder that only its owner can enter. A head that is stopped or hung does not
answer; then there is nothing to see.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from relax_actor.actor import wire
from relax_actor.actor.wire import Look, Seen
from relax_actor.node.sight import Sight
from transport import codec
from transport.address import Address
from transport.control import Frames
from transport.errors import CodecError
from transport.zmq_control import ZmqNetwork

ANSWER_S = 2.0
"""How long all answers together may take."""


def ask_head(address: str, looks: Sequence[Look], timeout_s: float = ANSWER_S) -> dict[int, Sight]:
    """Ask the agents of other hosts; return what they saw, by the ids of the questions.

    Args:
        address: of the head, on this host.
        looks: what to look at, each with an id of its own.
        timeout_s: for all of them; who has not answered by then is left out.
    """
    return asyncio.run(_Asking(looks).ask(Address.parse(address), timeout_s))


class _Asking:
    def __init__(self, looks: Sequence[Look]) -> None:
        self._looks = looks
        self._open = {look.id for look in looks}
        self._sights: dict[int, Sight] = {}
        self._all_answered = asyncio.Event()

    async def ask(self, address: Address, timeout_s: float) -> dict[int, Sight]:
        network = ZmqNetwork()
        try:
            channel = network.connect(address, self._heard, identity=f"observer#{os.getpid()}".encode())
            for look in self._looks:
                channel.send([codec.encode(look)])
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_answered.wait(), timeout_s)
        finally:
            network.close()
        return self._sights

    def _heard(self, frames: Frames) -> None:
        with suppress(CodecError, msgspec.MsgspecError):
            seen = wire.decode(frames[0])
            if isinstance(seen, Seen) and seen.id in self._open:
                self._open.discard(seen.id)
                if seen.sight:
                    self._sights[seen.id] = msgspec.json.decode(seen.sight, type=Sight)
        if not self._open:
            self._all_answered.set()
