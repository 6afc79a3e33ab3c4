"""Head <-> node agent: a host joins, keeps its lease, and has processes begin and end."""

import msgspec

from relax_actor.actor.wire.base import Record
from relax_actor.node.lease import LeaseTerms


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


class Shutdown(Record, frozen=True, kw_only=True, tag="shutdown"):
    """Head to node agent: kill what is left, sweep, end."""


class Spawn(Record, frozen=True, kw_only=True, tag="spawn"):
    """Head to node agent: start this incarnation. The frames that follow are the actor's arguments."""

    name: str
    incarnation: int
    target: str  # module:Class, or path.py:Class for a class of the user's script
    zygote: str
    address: str  # where the actor binds
    log: str
    crash: str  # where it writes why it died
    env: dict[str, str] = msgspec.field(default_factory=dict)
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


class Promote(Record, frozen=True, kw_only=True, tag="promote"):
    """Head to node agent and to the spare: from now on it is this incarnation."""

    spare: str
    name: str
    incarnation: int


class Kill(Record, frozen=True, kw_only=True, tag="kill"):
    """Head to node agent: SIGKILL its process group now."""

    name: str
    incarnation: int


class Hung(Record, frozen=True, kw_only=True, tag="hung"):
    """Node agent to head: the actor's page says that it hangs."""

    name: str
    incarnation: int
    why: str


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


AgentRecord = (
    AgentReady
    | Carried
    | Renew
    | Renewed
    | Shutdown
    | Spawn
    | Spawned
    | Promote
    | Kill
    | Hung
    | Dying
    | Exited
)
