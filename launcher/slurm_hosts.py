"""The hosts of the allocation that this process is in, and how a node agent is started on each.

Every host has a job step of its own (docs/decisions/0022-a-job-step-for-each-host.md): `srun` for one task is
a command that leads to another host, as ssh is, and its standard input is the agent's lease as there.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from launcher.hostlist import expand_all
from launcher.hosts import HostEntry
from launcher.options import Launcher, LaunchOptions, RemoteOptions
from launcher.selecting import select, within
from launcher.slurm_words import SlurmError
from launcher.ssh import FOLDER, environment, session_of
from relax_actor import network
from relax_actor.supervision.hosts import Host, Session
from relax_actor.visible import scheduled_gpus, visible_gpus

LOOPBACK = "127.0.0.1"

SRUN = (
    "srun",
    "--ntasks-per-node=1",
    "--overlap",  # agents, and whatever else the user runs in the allocation, share its resources
    "--mem=0",  # all of the job's memory
    "--cpu-bind=none",
    "--export=ALL",  # also where SLURM_EXPORT_ENV says something else
    "--kill-on-bad-exit=1",
)
UNBUFFERED = "--unbuffered"
"""Else Slurm passes on whole lines only, and what an agent says of itself are no lines."""

FAILED = "SLURM_EXIT_ERROR=255"
"""Has srun leave with ssh's 255 where Slurm failed, so that every other code is the task's own."""

RETRY_ON = "Socket timed out|Unable to contact slurm controller|Communication connection failure"
"""What srun says where a busy slurmctld would serve it a little later."""

SURVEY_S = 180.0
"""How long the hosts may take to say what they are; nodes that were asleep are woken for it."""

SURVEYS = 3
"""How often a host is asked: a busy Slurm was seen to lose what a task wrote."""

_ASKED = (
    "SLURMD_NODENAME",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "SLURM_GPUS_ON_NODE",
)
_PRINT = (
    "import os; print('relax-actor', *(f'{n}={os.environ[n]}' for n in %r if n in os.environ), sep='\\t')"
)
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
    argv = [*SRUN, f"--nodes={len(allocation.nodes)}", "--input=none", sys.executable, "-S", "-c"]
    environs: dict[str, dict[str, str]] = {}
    for _ in range(SURVEYS):
        environs |= parse_survey(run([*argv, _PRINT % (_ASKED,)]))
        if environs.keys() >= set(allocation.nodes):
            break
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


def in_allocation(
    options: LaunchOptions, environ: Mapping[str, str], *, rehearse: bool = False
) -> LaunchOptions:
    """Return options with the hosts of the allocation, or those of them that the user named.

    Args:
        options: of the command line; others than of an allocation stay as they are.
        environ: of this process.
        rehearse: whether nothing is asked of the hosts, so that their GPUs are not known.

    Raises:
        SlurmError: the hosts cannot be asked.
        SelectionError: the user named a host or a GPU that was not allocated.
    """
    if options.launcher is not Launcher.SLURM or options.slurm.submit:
        return options
    given = allocation(environ)
    there = tuple(HostEntry(name=name) for name in given.nodes) if rehearse else survey(given)
    chosen = within(there, options.hosts) if options.hosts else select(there, options.selection)
    return msgspec.structs.replace(options, hosts=chosen)


def hosts_of(
    options: LaunchOptions, allocation: Allocation, folder: Path, environ: MutableMapping[str, str]
) -> tuple[tuple[Host, ...], str]:
    """Return the hosts of a launch as a supervision tree takes them, and where they reach this process.

    Args:
        options: of `in_allocation`.
        allocation: of this process.
        folder: the run folder on the head.
        environ: of this process, whose actors inherit it: network interface and proxies are set in it.
    """
    others = [entry for entry in options.hosts if entry.name != allocation.here]
    peer = network.resolved(others[0].address or others[0].name) if others else LOOPBACK
    head = options.network.master_addr or network.source_address(peer)
    interface = options.network.interface
    words = [head, *(word for entry in options.hosts for word in (entry.name, entry.address) if word)]
    no_proxy = tuple(dict.fromkeys(("localhost", LOOPBACK, *words)))
    own = next((entry.interface for entry in options.hosts if entry.name == allocation.here), "")
    network.set_environment(environ, peer=peer, interface=own or interface, no_proxy=no_proxy)
    hosts = []
    for entry in options.hosts:
        if entry.name == allocation.here:
            hosts.append(_here(entry, options, head))
            continue
        session = session_of(entry, options.remote, options.network, no_proxy)
        hosts.append(_elsewhere(entry, options.remote, allocation, session, folder))
    return tuple(hosts), head


def problem_of(host: str, output: str, fact: str) -> SlurmError:
    """Return why no agent could be started on a host: by its own word, or by what srun wrote."""
    return SlurmError(f"srun to {host}", fact or output)


def _here(entry: HostEntry, options: LaunchOptions, head: str) -> Host:
    session = Session(env=environment(options.remote, options.network))
    return Host(name=entry.label, address=head, session=session, term_is_for_head=True)


def _elsewhere(
    entry: HostEntry, remote: RemoteOptions, allocation: Allocation, session: Session, folder: Path
) -> Host:
    return Host(
        name=entry.label,
        prefix=step(entry.name, allocation),
        address=network.resolved(entry.address or entry.name),
        python=remote.python,
        run_dir=str(folder / FOLDER / entry.label),
        session=msgspec.structs.replace(session, retry_on=RETRY_ON),
        term_is_for_head=True,  # Slurm sends it to every process of a job
    )


def step(name: str, allocation: Allocation) -> tuple[str, ...]:
    """Return the command that runs another one as the only task of a job step on a host."""
    where = (f"--jobid={allocation.job_id}", "--nodes=1", "--ntasks=1", f"--nodelist={name}")
    return ("env", FAILED, *SRUN, UNBUFFERED, *where, "--job-name=relax-actor")


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
