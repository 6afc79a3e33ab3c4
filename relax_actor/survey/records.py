"""What a head asks a host before a run, and what the host answers. Records only."""

import msgspec


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a host."""

    is_full: bool = False  # digests of whole files, not of their ends
    paths: dict[str, str] = {}  # what a user calls each -> folder or file that is to be read
    run_dir: str = ""  # where actors are to write; need not be there
    shm_root: str = "/dev/shm"  # noqa: S108 - that is where shared memory is
    shared_file: str = ""  # a file that the head has written
    shared_text: str = ""  # and what is in it
    ports: tuple[int, int] | None = None  # first and last of those that may be bound
    listens: bool = False  # whether other hosts are to try to reach it
    run_ids: tuple[str, ...] = ()  # of earlier runs in the same run folder
    needs_gpus: bool = True


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host is to try to connect to; the second thing that is asked."""

    addresses: dict[str, tuple[str, int]] = {}  # what the head calls it -> address and port
    timeout_s: float = 5.0


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """What became of that."""

    failures: dict[str, str] = {}  # by the names in `Targets`


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Who uses a GPU."""

    pid: int
    owner: str = ""  # empty: it cannot be seen from here
    name: str = ""
    used_mib: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a host."""

    index: str
    uuid: str = ""
    name: str = ""
    total_mib: int = 0
    used_mib: int = 0
    processes: tuple[GpuProcess, ...] = ()


class PathFact(msgspec.Struct, frozen=True, kw_only=True):
    """What there is at a path."""

    error: str = ""  # why it cannot be read
    files: int = 0
    size_bytes: int = 0
    digest: str = ""  # equal for equal names and contents


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface."""

    name: str
    is_up: bool
    addresses: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is and has; empty or 0 where it cannot be known."""

    node: str = ""  # what it calls itself
    python: str = ""
    versions: dict[str, str] = {}  # of distributions, and of `cuda` as torch was built for it
    code: str = ""  # digest of relax-actor's own files
    driver: str = ""  # NVIDIA's
    gpus: tuple[Gpu, ...] = ()
    visible: tuple[str, ...] | None = None  # what its environment leaves of them; None: all
    oddity: str = ""  # what is odd about that
    memory_bytes: int = 0  # available
    shm_bytes: int = 0  # free
    shm_error: str = ""
    open_files: tuple[int, int] = (
        0,
        0,
    )  # limit, raised already, and its maximum; -1: any
    locked_bytes: int = 0  # -1: any
    disk_bytes: int = 0  # free
    disk_error: str = ""
    sync_s: float = 0.0  # how long a file took to be on disk
    is_shared: bool = False  # whether it sees the head's file
    loopback_line: str = ""  # of /etc/hosts, where its name leads to itself
    interfaces: tuple[Interface, ...] = ()
    proxies: tuple[str, ...] = ()  # names of the variables
    no_proxy: tuple[str, ...] = ()
    paths: dict[str, PathFact] = {}
    leftovers: tuple[str, ...] = ()  # processes of earlier runs
    time_s: float = 0.0  # unix, when it answered
    port: int = 0  # where it listens
