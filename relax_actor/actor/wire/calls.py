"""Actor <-> actor: a call and its answer, and what keeps calls in bounds.

A packed value (`transport.codec.pack`), which is the arguments of a call or its result, is in the record's
`body` where it is one small frame; otherwise its frames follow the record, without those that are in shared
memory (`bulk`).
"""

import msgspec

from relax_actor.actor.wire.base import Record


class BulkRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a frame of a message is, if not in the message."""

    frame: int  # its place among the frames of the packed value
    segment: str
    nbytes: int
    writable: bool  # nobody else reads it


class Call(Record, frozen=True, kw_only=True, tag="call"):
    """Actor to actor: run this endpoint."""

    id: int
    method: str
    run_id: str
    sender: str
    sender_incarnation: int
    to_incarnation: int
    budget_s: float  # what is left of the caller's deadline; clocks of two hosts are never compared
    until_s: float = 0.0  # the deadline on the clock that both have; 0 between hosts
    wants_reply: bool = True
    body: bytes = b""
    bulk: tuple[BulkRef, ...] = ()


class Result(Record, frozen=True, kw_only=True, tag="result"):
    """Callee to caller: the method returned."""

    id: int
    body: bytes = b""
    bulk: tuple[BulkRef, ...] = ()


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """Callee to caller: the method raised (`type_name` is set) or was not started."""

    id: int
    kind: str  # "remote", "refused", "full", "unserializable"
    message: str
    type_name: str = ""
    traceback: str = ""


class Credit(Record, frozen=True, kw_only=True, tag="credit"):
    """Callee to caller: so much of what it sent has left the mailbox."""

    messages: int
    bytes: int


class Cancel(Record, frozen=True, kw_only=True, tag="cancel"):
    """Caller to callee: nobody waits for this call any more."""

    id: int


class Query(Record, frozen=True, kw_only=True, tag="query"):
    """Caller to callee: a question its I/O thread answers, however busy its main thread is."""

    id: int
    what: str  # a `QueryKind`


class Probe(Record, frozen=True, kw_only=True, tag="probe"):
    """Along a chain of waits: whoever waits in `call_id` for the receiver is waited for by all of `chain`."""

    origin: str  # name#incarnation
    wait_id: int  # the call of origin that it waits for
    call_id: int  # the call of the last in the chain to the receiver
    chain: tuple[str, ...]  # names, origin first


class Unmapped(Record, frozen=True, kw_only=True, tag="unmapped"):
    """Receiver to owner: these segments are not looked at any more; one entry for each use."""

    segments: tuple[str, ...]


CallRecord = Call | Result | Failed | Credit | Cancel | Query | Probe | Unmapped
