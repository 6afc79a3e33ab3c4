"""The hosts of the allocation that this process is in, and how a node agent is started on each.

Every host has a job step of its own (docs/decisions/0017-a-job-step-for-each-host.md): `srun` for one task is
a command that leads to another host, as ssh is, and its standard input is the agent's lease as there.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from launcher.hostlist import expand_all
from launcher.hosts import HostEntry
from launcher.options import RemoteOptions
from launcher.slurm_words import SlurmError
from relax_actor.supervision.hosts import Host, Session
from relax_actor.visible import scheduled_gpus, visible_gpus

SRUN = (
    "srun",
    "--ntasks-per-node=1",
    "--overlap",  # agents, and whatever else the user runs in the allocation, share its resources
    "--mem=0",  # all of the job's memory
    "--cpu-bind=none",
    "--export=ALL",  # also where SLURM_EXPORT_ENV says something else
    "--kill-on-bad-exit=1",
    "--unbuffered",
)
FAILED = "SLURM_EXIT_ERROR=255"
"""Has srun leave with ssh's 255 where Slurm failed, so that every other code is the task's own."""

RETRY_ON = "Socket timed out|Unable to contact slurm controller|Communication connection failure"
"""What srun says where a busy slurmctld would serve it a little later."""

SURVEY_S = 180.0
"""How long the hosts may take to say what they are; nodes that were asleep are woken for it."""

_ASKED = ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
_PRINT = "import os; print('relax-actor', *(f'{n}={os.environ[n]}' for n in %r if n in os.environ), sep='\\t')"
_ADDRESS = re.compile(r"NodeName=(\S+).*? NodeAddr=(\S+)")


class Run(Protocol):
    """Runs a command of Slurm and returns what it wrote."""

    def __call__(self, argv: Sequence[str]) -> str:
        """Run it.

        Raises:
            SlurmError: it failed.
        """
        ...


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm gave to this job."""

    job_id: str
    nodes: tuple[str, ...]
    here: str = ""  # which of them this process is on; empty: none of them, as under salloc on a login node


def is_inside(environ: Mapping[str, str]) -> bool:
    """Whether this process is in an allocation, and able to use it."""
    return bool(environ.get("SLURM_JOB_ID")) and shutil.which("srun") is not None


def allocation(environ: Mapping[str, str], run: Run | None = None) -> Allocation:
    """Return the allocation that this process is in.

    Args:
        environ: its environment.
        run: for scontrol; None: the real one, or the built-in expander where there is none.

    Raises:
        SlurmError: it names no hosts.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not nodelist:
        raise SlurmError("SLURM_JOB_NODELIST", "is not set, although SLURM_JOB_ID is")
    if run is None and shutil.which("scontrol"):
        run = run_slurm
    names = run(["scontrol", "show", "hostnames", nodelist]).split() if run else expand_all(nodelist)
    here = environ.get("SLURMD_NODENAME", "")
    return Allocation(
        job_id=environ.get("SLURM_JOB_ID", ""), nodes=tuple(names), here=here if here in names else ""
    )


def survey(allocation: Allocation, run: Run | None = None) -> tuple[HostEntry, ...]:
    """Ask every host, in one job step, which GPUs it has for us; ask Slurm for the addresses.

    Args:
        allocation: of this process.
        run: for srun and scontrol; None: the real ones.

    Raises:
        SlurmError: a host does not answer.
    """
    run = run or run_slurm
    count = len(allocation.nodes)
    said = run([*SRUN, f"--nodes={count}", "--input=none", sys.executable, "-S", "-c", _PRINT % (_ASKED,)])
    environs = parse_survey(said)
    if missing := [name for name in allocation.nodes if name not in environs]:
        raise SlurmError("srun", f"{', '.join(missing)} did not answer")
    addresses = parse_addresses(run(["scontrol", "--oneliner", "show", "node", ",".join(allocation.nodes)]))
    return tuple(
        HostEntry(
            name=name,
            address=addresses.get(name, name),
            gpus=gpus_of(environs[name]),
            where=f"job {allocation.job_id}",
        )
        for name in allocation.nodes
    )


def parse_survey(said: str) -> dict[str, dict[str, str]]:
    """Return the variables of each host; lines that are something else do not count."""
    found = {}
    for line in said.splitlines():
        mark, *words = line.rstrip("\r\n").split("\t")
        environ = dict(word.split("=", 1) for word in words if "=" in word)
        if mark == "relax-actor" and "SLURMD_NODENAME" in environ:
            found[environ["SLURMD_NODENAME"]] = environ
    return found


def parse_addresses(said: str) -> dict[str, str]:
    """Return the address of each host, as `scontrol --oneliner show node` has it."""
    return {name: address for name, address in _ADDRESS.findall(said) if address != "(null)"}


def gpus_of(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs of a task as its CUDA_VISIBLE_DEVICES must name them; None where nothing is said.

    Slurm's own lists count only where CUDA's is not set: behind device control groups they are numbered as
    on the whole host, and CUDA's from 0.

    Args:
        environ: of the task.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return visible_gpus(environ["CUDA_VISIBLE_DEVICES"])
    named = scheduled_gpus(environ)
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return tuple(map(str, range(int(count)))) if named is None and count.isdigit() else named


def hosts_of(
    entries: Sequence[HostEntry],
    allocation: Allocation,
    run_dir: Path,
    *,
    remote: RemoteOptions = RemoteOptions(),  # noqa: B008 - frozen
    interface: str = "",
) -> list[Host]:
    """Return the hosts as a supervision tree takes them, in their order.

    Args:
        entries: of `survey`, filtered by what the user named.
        allocation: of this process.
        run_dir: the head's run folder; what other hosts write is handed over to it.
        remote: what actors there start in.
        interface: the network interface of collectives, where an entry names none; empty: by the route.
    """
    bypassed = tuple(dict.fromkeys(word for entry in entries for word in (entry.name, entry.address) if word))
    return [
        Host(
            name=entry.label,
            prefix=() if entry.name == allocation.here else step(entry.name, allocation),
            address=entry.address or entry.name,
            python="" if entry.name == allocation.here else remote.python,
            run_dir="" if entry.name == allocation.here else str(run_dir / "hosts" / entry.label),
            term_is_for_head=True,  # Slurm sends it to every process of a job
            session=Session(
                workdir=remote.workdir or str(Path.cwd()),
                env=tuple((os.fsencode(name), os.fsencode(value)) for name, value in remote.env),
                setup=remote.setup,
                interface=entry.interface or interface,
                no_proxy=bypassed,
                retry_on=RETRY_ON,
            ),
        )
        for entry in entries
    ]


def step(name: str, allocation: Allocation) -> tuple[str, ...]:
    """Return the command that runs another one as the only task of a job step on a host."""
    where = (f"--jobid={allocation.job_id}", "--nodes=1", "--ntasks=1", f"--nodelist={name}")
    return ("env", FAILED, *SRUN, *where, "--job-name=relax-actor")


def run_slurm(argv: Sequence[str]) -> str:
    """Run a command of Slurm and return its standard output.

    Raises:
        SlurmError: it failed, is not there, or took too long.
    """
    try:
        done = subprocess.run(
            list(argv),
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=SURVEY_S,
            stdin=subprocess.DEVNULL,
            env=os.environ.copy(),
        )
    except FileNotFoundError:
        raise SlurmError(argv[0], "is not on the PATH of this host") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(argv[0], f"had not ended after {SURVEY_S:g} s") from None
    if done.returncode:
        raise SlurmError(argv[0], done.stderr or f"ended with exit code {done.returncode}")
    return done.stdout
