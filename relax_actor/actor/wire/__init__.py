"""The records of the control wire, a module for each of its conversations.

- `agents`: head <-> node agent, about a host and its processes
- `lives`: head <-> actor, from its first word to its stop
- `calls`: actor <-> actor, calls, answers and what keeps them in bounds
- `seeing`: observer and operator <-> head

The first frame of a message is one of these records; which, its tag says, so that tags never change. A record
only ever grows at its end, by fields with a default.
"""

from typing import Any, cast

import msgspec

from relax_actor.actor.wire.agents import (
    AgentReady,
    AgentRecord,
    CallMark,
    Carried,
    Dying,
    Exited,
    Hung,
    Kill,
    NodeConfig,
    Promote,
    Renew,
    Renewed,
    Shutdown,
    Spawn,
    Spawned,
)
from relax_actor.actor.wire.base import Record
from relax_actor.actor.wire.calls import (
    BulkRef,
    Call,
    CallRecord,
    Cancel,
    Credit,
    Failed,
    Probe,
    Query,
    Result,
    Unmapped,
)
from relax_actor.actor.wire.lives import (
    GangAbort,
    Hello,
    LifeRecord,
    Meeting,
    PeerGone,
    PeerUp,
    Ready,
    Regroup,
    Released,
    SpareReady,
    Stop,
)
from relax_actor.actor.wire.seeing import Look, Order, Ordered, SeeingRecord, Seen
from transport import codec
from transport.control import Frame

__all__ = [
    "AgentReady",
    "AnyRecord",
    "BulkRef",
    "Call",
    "CallMark",
    "Cancel",
    "Carried",
    "Credit",
    "Dying",
    "Exited",
    "Failed",
    "GangAbort",
    "Hello",
    "Hung",
    "Kill",
    "Look",
    "Meeting",
    "NodeConfig",
    "Order",
    "Ordered",
    "PeerGone",
    "PeerUp",
    "Probe",
    "Promote",
    "Query",
    "Ready",
    "Record",
    "Regroup",
    "Released",
    "Renew",
    "Renewed",
    "Result",
    "Seen",
    "Shutdown",
    "SpareReady",
    "Spawn",
    "Spawned",
    "Stop",
    "Unmapped",
    "decode",
]

AnyRecord = AgentRecord | LifeRecord | CallRecord | SeeingRecord

_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(cast(Any, AnyRecord))


def decode(frame: Frame) -> AnyRecord:
    """Read the first frame of a message.

    Raises:
        CodecError: it is none of these records.
    """
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, MemoryError):
        return cast(AnyRecord, codec.decode(cast(Any, AnyRecord), frame))  # surrogates, or the error's text
