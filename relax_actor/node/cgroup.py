"""A control group an actor, where this host lets us make one; and what the kernel says of memory.

A control group holds whatever an actor starts, however it detaches itself, and `cgroup.kill` ends it in one
write. None of it is required: without the right to make one, process groups and marks do the work.
"""

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from relax_actor.node import process
from transport.clock import Clock, SystemClock

VARIABLE = "RELAX_ACTOR_CGROUPS"
"""`off` in the environment: make none."""

OOM_LOOK_S = 2.0
"""How often what the kernel counts is to be looked at."""

OOM_RECENT_S = 10.0
"""What was counted so long before a death was felt has nothing to do with it."""

_PREFIX = "relax-actor-"

SYSTEM_CLOCK = SystemClock()


def root(run_id: str, agent: int, mounts: str | None = None, own: str | None = None) -> Path | None:
    """Return the folder for the control groups of an agent's actors, if this process may make them at all.

    Args:
        run_id: names the folder, with `agent`.
        agent: pid of the node agent.
        mounts: text of /proc/self/mounts; read by default.
        own: text of /proc/self/cgroup; read by default.
    """
    if os.environ.get(VARIABLE) == "off":
        return None
    mounts = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    where = [fields[1] for line in mounts.splitlines() if (fields := line.split())[2] == "cgroup2"]
    path = [line[3:] for line in own.splitlines() if line.startswith("0::")]
    if not where or not path:
        return None
    folder = Path(where[0] + path[0])
    may = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
    return folder_of(folder, run_id, agent) if may else None


def folder_of(parent: Path, run_id: str, agent: int) -> Path:
    """Return the folder for the control groups of an agent's actors, in the agent's own control group."""
    return parent / f"{_PREFIX}{run_id}-{agent}"


class Cgroups:
    """The control groups of a run on this host. Every method does nothing where there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def make(self, name: str, incarnation: int) -> str:
        """Make an actor's control group and return its folder; empty if it cannot be had."""
        if self._folder is None:
            return ""
        path = self._path(name, incarnation)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            self._folder = None  # not ours to make: asked once
            return ""
        return str(path)

    def end(self, name: str, incarnation: int) -> bool:
        """Kill whatever is in an actor's control group and remove it; whether nothing is left."""
        return self._folder is None or _end(self._path(name, incarnation))

    def close(self) -> bool:
        """Kill and remove what is left of them all, also of the run's agents that have died.

        Returns:
            Whether nothing is left; what does not go at once is left for the next who closes.
        """
        for folder in self._closable():
            for path in folder.iterdir():
                if path.is_dir():
                    _end(path)
            _end(folder)
        return not self._closable()

    def _closable(self) -> list[Path]:
        if self._folder is None:
            return []
        run, _, _ = self._folder.name.rpartition("-")
        folders = list(self._folder.parent.glob(f"{run}-*"))
        return [each for each in folders if each == self._folder or not _is_of_a_living_agent(each)]

    def oom_evidence(self, name: str, incarnation: int) -> str:
        """Return what an actor's own group says of kills for want of memory; empty if it does not count."""
        if self._folder is None:
            return ""
        path = self._path(name, incarnation) / "memory.events"
        kills = _count(path)
        return f"{path} oom_kill {kills}" if kills else ""

    def _path(self, name: str, incarnation: int) -> Path:
        assert self._folder is not None  # noqa: S101 - asked by every caller
        return self._folder / f"{name.replace('/', '~')}.{incarnation}"


def is_in(pid: int, folder: str) -> bool:
    """Whether a process, dead or alive but not reaped, is in a control group; False for no folder."""
    if not folder:
        return False
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    name = f"/{Path(folder).parent.name}/{Path(folder).name}"
    return any(line.startswith("0::") and line.removesuffix(" (deleted)").endswith(name) for line in lines)


def enter(folder: str) -> None:
    """Move this process into a control group; where that is refused it stays where it is."""
    if folder:
        with suppress(OSError):
            (Path(folder) / "cgroup.procs").write_text("0")


class OomWatch:
    """Notices when the kernel killed for want of memory in the control group that this process shares.

    It is not said who was killed, and others share the group, or the machine. So what was counted long before
    a death says nothing of it.

    Args:
        path: a file with a line `oom_kill N`; by default that of this process' own control group, else the
            machine's.
        clock: tells what is long ago.
    """

    def __init__(self, path: Path | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = path or _own_counter(), clock
        self._looks: deque[tuple[float, int]] = deque()
        self.look()

    def look(self) -> None:
        """Note the count; to be called every `OOM_LOOK_S`."""
        now_s = self._clock.monotonic()
        self._looks.append((now_s, _count(self._path) or 0))
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - OOM_RECENT_S:
            self._looks.popleft()

    def evidence(self) -> str:
        """Return what has happened lately and since it was asked last; empty if nothing has."""
        self.look()
        before, now = self._looks[0], self._looks[-1]
        self._looks = deque([now])
        risen = now[1] - before[1]
        return f"{self._path} oom_kill +{risen}" if risen > 0 else ""


def _is_of_a_living_agent(folder: Path) -> bool:
    return process.start_time(int(folder.name.rpartition("-")[2])) is not None


def _own_counter() -> Path:
    """Return the file that counts for this process: control groups version 2, version 1, the machine."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for place in _places(controllers, path):
            if _count(place) is not None:
                return place
    return Path("/proc/vmstat")


def _places(controllers: str, path: str) -> list[Path]:
    base = Path("/sys/fs/cgroup")
    if controllers == "":
        return [Path(f"{base}{path}/memory.events"), base / "memory.events"]
    if controllers == "memory":  # in a container the path may be the host's
        return [Path(f"{base}/memory{path}/memory.oom_control"), base / "memory" / "memory.oom_control"]
    return []


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _end(path: Path) -> bool:
    try:
        if "populated 1" in (path / "cgroup.events").read_text():
            (path / "cgroup.kill").write_text("1")
            return False
        path.rmdir()
    except FileNotFoundError:
        return not path.exists()  # a kernel before 5.14 has no cgroup.kill
    except OSError:
        return False
    return True
