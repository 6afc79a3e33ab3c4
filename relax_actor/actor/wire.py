"""The records of the control wire, in the order of an actor's life.

head <-> node agent: spawn, spawned, kill, exited.  head <-> actor: ready, peers, stop.
actor <-> actor: call, result, failed, and what keeps calls in bounds: credit, cancel, query, probe, released.
The first frame of a message is one of these records. A packed value (`transport.codec.pack`), which is the
arguments of a call or its result, is in the record's `body` where it is one small frame; otherwise its frames
follow the record, without those that are in shared memory (`bulk`).
"""

from typing import Any, cast

import msgspec

from relax_actor.node.lease import LeaseTerms
from transport import codec
from transport.control import Frame


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all control records."""


class NodeConfig(Record, frozen=True, kw_only=True, tag="node_config"):
    """Head to node agent, on its standard input: what all processes of the host have in common."""

    run_id: str
    run_dir: str
    socket_dir: str
    head: str  # address
    head_pid: int
    shm_root: str
    zygotes: dict[str, tuple[str, ...]]  # name: modules it imports before it forks
    path: tuple[str, ...] = ()  # goes to the END of every actor's sys.path
    host: str = "local"
    agent_incarnation: int = 1  # how often the head has started an agent on this host
    epoch: int = 1  # how often a head has started with this run folder
    keys: bytes = b""  # of the run, for tcp; see `transport.security.CurveKeys`
    listen: str = ""  # where the host's actors take calls of other hosts; empty: there are none
    lease: LeaseTerms = LeaseTerms()
    join_timeout_s: float = 120.0
    early: int = -1  # descriptor for early words to a head on the same host; see `node.early`
    term_is_for_head: bool = False  # SIGTERM is no order here; see `supervision.hosts.Host`

    @property
    def run_mark(self) -> str:
        """What calls bear, so that those of another run or of an earlier head are refused."""
        return f"{self.run_id}/{self.epoch}"

    @property
    def is_remote(self) -> bool:
        """Whether the head is on another host, so that its death is no fact the kernel tells."""
        return not self.head.startswith("ipc:")


class AgentReady(Record, frozen=True, kw_only=True, tag="agent_ready"):
    """Node agent to head: it runs and its zygotes are up."""

    pid: int
    socket_dir: str = ""
    node: str = ""  # what the host calls itself


class Spawn(Record, frozen=True, kw_only=True, tag="spawn"):
    """Head to node agent: start this incarnation. The frames that follow are the actor's arguments."""

    name: str
    incarnation: int
    target: str  # module:Class, or path.py:Class for a class of the user's script
    zygote: str
    address: str  # where the actor binds
    log: str
    crash: str  # where it writes why it died
    env: dict[str, str] = {}
    python: str = ""  # the interpreter that runs it where no zygote does; the agent's own if empty
    oom_score_adj: int = 0
    devices: tuple[str, ...] = ()
    cgroup: str = ""  # the folder it moves itself to; filled in by the agent
    is_spare: bool = False  # run the constructor, then wait for a name
    hang_after_s: float | None = None
    is_rank: bool = False  # of a gang: no calls before its first group is formed


class Spawned(Record, frozen=True, kw_only=True, tag="spawned"):
    """Node agent to head: the process exists."""

    name: str
    incarnation: int
    pid: int
    start_ticks: int | None = None  # since boot of its host; with the pid it is never used again


class Kill(Record, frozen=True, kw_only=True, tag="kill"):
    """Head to node agent: SIGKILL its process group now."""

    name: str
    incarnation: int


class Exited(Record, frozen=True, kw_only=True, tag="exited"):
    """Node agent to head: the process and its whole group are gone, its segments are swept."""

    name: str
    incarnation: int
    code: int | None = None
    signal: int | None = None
    error: str = ""  # what the actor wrote of its own death, or why it could not be started
    oom: str = ""  # the evidence that the kernel took it for want of memory
    held: str = ""  # who still holds memory of its devices
    doing: str = ""  # what it was in the middle of; for a head on another host, as the next
    last: str = ""  # the last line of its log
    was_ready: bool = False  # it took messages, by its page; its own word of that may not have come through


class Shutdown(Record, frozen=True, kw_only=True, tag="shutdown"):
    """Head to node agent: kill what is left, sweep, end."""


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """Actor to head: it can hear; the head answers with a `PeerUp` for every actor that is up."""

    name: str
    incarnation: int


class Ready(Record, frozen=True, kw_only=True, tag="ready"):
    """Actor to head: its constructor returned."""

    name: str
    incarnation: int
    address: str = ""  # where it takes calls of other hosts, if it does


class PeerUp(Record, frozen=True, kw_only=True, tag="peer_up"):
    """Head to actor: this incarnation of this peer takes calls at this address."""

    name: str
    incarnation: int
    address: str


class PeerGone(Record, frozen=True, kw_only=True, tag="peer_gone"):
    """Head to actor: this incarnation is gone and everything it held is free."""

    name: str
    incarnation: int
    reason: str


class Stop(Record, frozen=True, kw_only=True, tag="stop"):
    """Head to actor: finish the message at hand, clean up, end."""

    reason: str
    drain_s: float = 0.0  # above 0: finish first what is under way, see `Actor.on_drain`


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


class Carried(Record, frozen=True, kw_only=True, tag="carried"):
    """Head <-> node agent: first frame of every message; the record follows. See `node.line`."""

    epoch: int
    incarnation: int  # of the agent
    number: int  # 0: may be lost
    heard: int  # the last number heard from the other end


class Renew(Record, frozen=True, kw_only=True, tag="renew"):
    """Node agent to head: it lives, and asks for its lease again."""

    number: int


class Renewed(Record, frozen=True, kw_only=True, tag="renewed"):
    """Head to node agent: the lease is granted, to `ttl_s` after it was asked for."""

    number: int


class CallMark(Record, frozen=True, kw_only=True):
    """How far the calls of one sender had come.

    Args:
        sender: which one; see `page.sender_key`.
        begun: the highest id that has begun.
        over: the id that ended last, by result or exception; 0 for none.
    """

    sender: int
    begun: int
    over: int


class Dying(Record, frozen=True, kw_only=True, tag="dying"):
    """Node agent to head, head to actors: the incarnation takes no more messages; `Exited` will follow."""

    name: str
    incarnation: int
    reason: str
    marks: tuple[CallMark, ...] = ()
    marks_are_complete: bool = False  # whether a sender without a mark has begun nothing
    running_sender: int = 0  # whose call was the last to begin, if it was not over
    running_id: int = 0


class SpareReady(Record, frozen=True, kw_only=True, tag="spare_ready"):
    """Spare to head: its constructor returned; it waits for a name."""

    name: str


class Promote(Record, frozen=True, kw_only=True, tag="promote"):
    """Head to node agent and to the spare: from now on it is this incarnation."""

    spare: str
    name: str
    incarnation: int


class GangAbort(Record, frozen=True, kw_only=True, tag="gang_abort"):
    """Head to a surviving rank's I/O thread: this epoch's group is broken."""

    epoch: int
    reason: str


class Released(Record, frozen=True, kw_only=True, tag="released"):
    """Rank to head: its main thread has left the collectives of that epoch."""

    name: str
    incarnation: int
    epoch: int


class Regroup(Record, frozen=True, kw_only=True, tag="regroup"):
    """Head to rank: join the group of a new epoch."""

    epoch: int
    rank: int
    size: int
    rendezvous: str = ""  # where the ranks meet, fresh for each epoch; rank 0 opens it and tells the head


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


class Meeting(Record, frozen=True, kw_only=True, tag="meeting"):
    """Rank 0 to head: where the ranks of this epoch meet; the others are told to join only now."""

    name: str
    incarnation: int
    epoch: int
    rendezvous: str


class Look(Record, frozen=True, kw_only=True, tag="look"):
    """Observer to head, head to node agent: tell what there is to see of an incarnation, alive or dead."""

    id: int
    host: str  # as the tree names it
    name: str
    incarnation: int
    wants_stacks: bool = False


class Seen(Record, frozen=True, kw_only=True, tag="seen"):
    """Node agent to head, head to observer: the answer to a `Look`."""

    id: int
    sight: bytes = b""  # JSON, see `node.sight`; empty where there is no such host


class Order(Record, frozen=True, kw_only=True, tag="order"):
    """Operator to head: change something of the run, or say how far a change has come."""

    id: int
    what: str  # `kill`, `scale` or `look`
    name: str  # an actor to kill, else a child
    replicas: int = 0  # it is to have


class Ordered(Record, frozen=True, kw_only=True, tag="ordered"):
    """Head to operator: the answer to an `Order`."""

    id: int
    refusal: str = ""  # empty: it is being done
    hint: str = ""
    replicas: int = 0  # there are, those that come and go included
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


class Hung(Record, frozen=True, kw_only=True, tag="hung"):
    """Node agent to head: the actor's page says that it hangs."""

    name: str
    incarnation: int
    why: str


AnyRecord = (
    AgentReady
    | Spawned
    | Exited
    | Hello
    | Ready
    | Spawn
    | Kill
    | Shutdown
    | PeerUp
    | PeerGone
    | Stop
    | Call
    | Result
    | Failed
    | Carried
    | Renew
    | Renewed
    | Dying
    | SpareReady
    | Promote
    | GangAbort
    | Released
    | Regroup
    | Credit
    | Cancel
    | Query
    | Probe
    | Unmapped
    | Meeting
    | Look
    | Seen
    | Hung
    | Order
    | Ordered
)

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
