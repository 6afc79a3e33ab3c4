"""What `launch` and `plan` were asked to do about hosts, ssh, the network and Slurm: records, nothing else.

Hosts are how one run is launched, not what it is: none of this is a part of the configuration, and none of it
is in resolved.toml. `launcher.asking` makes these records out of the words of the command line, and refuses
what is wrong with them; whoever holds a `LaunchOptions` may rely on every value.
"""

from enum import StrEnum

import msgspec

from launcher.hosts import HostEntry

DEFAULT_FANOUT = 32
DEFAULT_CONNECT_TIMEOUT_S = 10


class Launcher(StrEnum):
    """What starts a node agent on a host."""

    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"


class Layout(StrEnum):
    """How trainer and rollouts divide the GPUs."""

    SEPARATE = "separate"
    COLOCATE = "colocate"  # both on all of them


class Order(StrEnum):
    """Which host the next actor goes to."""

    PACK = "pack"  # fill a host, then the next one
    SPREAD = "spread"  # the emptiest host


class Preflight(StrEnum):
    """How much is asked of the hosts before anything starts."""

    FULL = "full"
    QUICK = "quick"
    OFF = "off"


class Rehearsal(StrEnum):
    """How far a dry run goes."""

    NO = "no"
    LOCAL = "local"  # nothing leaves this host
    REMOTE = "remote"  # preflight on the hosts, then the plan


class Picked(msgspec.Struct, frozen=True, kw_only=True):
    """One host of `--include` or `--exclude`, such as `node2:0,2`."""

    host: str
    gpus: tuple[str, ...] = ()  # as the host's line names them; empty: all of it


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the hosts are used; `launcher.selecting.select` carries it out."""

    include: tuple[Picked, ...] = ()
    exclude: tuple[Picked, ...] = ()  # never both
    num_nodes: int = 0  # the first so many of what is left; 0 is all
    gpus_per_node: int = 0  # the first so many of each; 0 is auto: as its line says, else as it has


class GpuOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How many GPUs each side gets; 0 where nobody said."""

    layout: Layout = Layout.SEPARATE
    order: Order = Order.SPREAD
    total: int = 0  # `--gpus`
    train: int = 0
    rollout: int = 0


class SshOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How ssh reaches a host, where the hostfile does not say."""

    port: int = 0  # 0: what ssh's own configuration says
    user: str = ""
    identity: str = ""  # absolute path of a key
    options: tuple[str, ...] = ()  # KEY=VALUE, each for one `-o`
    fanout: int = DEFAULT_FANOUT  # sessions being opened at once
    connect_timeout_s: int = DEFAULT_CONNECT_TIMEOUT_S


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What actors on the hosts start in."""

    workdir: str = ""  # absolute; empty: the launcher's own
    python: str = ""  # absolute path of the interpreter there; empty: the launcher's own
    setup: str = ""  # text of a shell script that is sourced before the agent starts
    env: tuple[tuple[str, str], ...] = ()  # names are unique; values are secrets: never printed or logged

    def __repr__(self) -> str:
        names = ", ".join(name for name, _ in self.env)
        return f"RemoteOptions(workdir={self.workdir!r}, python={self.python!r}, env=[{names}])"


class NetworkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which addresses, interfaces and ports hosts use among themselves."""

    master_addr: str = ""  # where other hosts reach the head; empty: by the route to them
    interface: str = ""  # of every host whose line names none; empty: by the route to the peers
    ports: tuple[int, int] | None = (
        None  # first and last of those that may be bound; None: the kernel's choice
    )


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A job to submit, or the allocation that this process is in."""

    submit: bool = False  # `--slurm`: write an sbatch and submit it
    job_id: str = ""  # of the allocation that this process is in
    nodes: int = 0  # to ask for; 0: sbatch's default
    partition: str = ""
    account: str = ""
    time: str = ""
    options: tuple[str, ...] = ()  # KEY=VALUE or KEY, each for one `#SBATCH --`
    requeue: bool = False  # whether a preempted job goes back into the queue


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about hosts that a launch was told."""

    launcher: Launcher = Launcher.LOCAL  # `auto` is decided already
    hosts: tuple[HostEntry, ...] = ()
    """Those the user named, selection carried out; empty: this host, or all of the allocation.
    In an allocation these are a filter, and `launcher.selecting.within` applies them."""
    selection: Selection = Selection()
    gpus: GpuOptions = GpuOptions()
    ssh: SshOptions = SshOptions()
    remote: RemoteOptions = RemoteOptions()
    network: NetworkOptions = NetworkOptions()
    slurm: SlurmOptions = SlurmOptions()
    preflight: Preflight = Preflight.QUICK
    rehearsal: Rehearsal = Rehearsal.NO
    log_dir: str = ""  # absolute; empty: `logs` of the run folder
