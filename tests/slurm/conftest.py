"""A Slurm of two nodes on this machine, and what tests ask of it.

slurmctld and two slurmd run for the session in a temporary folder, with a munged and a key of their own. They
are ended by pid. What is missing skips the tests, or fails them where REQUIRE_SLURM=1 promises it.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from free_ports import free_ports
from slurm_waits import wait_until

NODES = ("n1", "n2")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "scontrol", "scancel", "squeue")
APART = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'mount -t tmpfs -o size=1g shm /dev/shm && exec "$@"',
    "sh",
)
"""Runs a command with an empty /dev/shm of its own."""

ROOT = Path(__file__).parents[2]

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
{gres_types}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=4000{gres}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=4000{gres}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


@dataclass(kw_only=True)
class Cluster:
    """A Slurm of two nodes that runs."""

    folder: Path
    has_gpus: bool  # of pretence: device files that nobody opens
    is_apart: bool  # whether the second node has shared memory of its own, as another machine has
    daemons: list[subprocess.Popen] = field(default_factory=list)
    sallocs: list[subprocess.Popen] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """The environment of its commands: this process' without Slurm's variables, our packages first."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return kept | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, *argv: str, check: bool = True, timeout_s: float = 120.0) -> str:
        """Run a command to its end and return what it wrote to standard output."""
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def popen(self, *argv: str, log: Path) -> subprocess.Popen:
        """Start a command."""
        with log.open("ab") as out:
            return subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def salloc(self, *argv: str, log: Path) -> subprocess.Popen:
        """Start a command in an allocation of both nodes; `clear` ends it."""
        started = self.popen("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", *argv, log=log)
        self.sallocs.append(started)
        return started

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING; empty once Slurm has forgotten it."""
        said = self("scontrol", "--oneliner", "show", "job", job, check=False)
        return next((word.partition("=")[2] for word in said.split() if word.startswith("JobState=")), "")

    def need_two_memories(self) -> None:
        """Skip a test, or fail it, where both nodes share one /dev/shm."""
        if not self.is_apart:
            _lacking("a node with shared memory of its own needs root and unshare")

    def segments(self) -> list[str]:
        """Name the shared-memory segments of the second node."""
        folder = Path(f"/proc/{self.daemons[-1].pid}/root/dev/shm")
        return sorted(each.name for each in folder.iterdir()) if self.is_apart else []

    def log(self) -> str:
        """Return what the daemons wrote, for a failing assertion."""
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in self.folder.glob("*.log"))

    def clear(self) -> None:
        """End all jobs, and wait until both nodes are idle."""
        self("scancel", "--full", "--user", str(os.geteuid()), check=False)
        wait_until(lambda: not self("squeue", "--noheader").strip(), "jobs end")
        while self.sallocs:
            self.sallocs.pop().wait(60.0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start a Slurm for the session."""
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        _lacking(f"Slurm is not here: no {', '.join(missing)} (Debian: slurm-wlm and munge)")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        cluster = Cluster(folder=Path(name), has_gpus=_device_files_are_here(), is_apart=_can_unshare())
        try:
            _start(cluster)
            yield cluster
        finally:
            _stop(cluster)


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    """Lend the Slurm to one test; afterwards no job is left."""
    yield cluster
    cluster.clear()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Make a run folder with a short path."""
    with tempfile.TemporaryDirectory(prefix=f"run-{secrets.token_hex(2)}-") as name:
        yield Path(name)


def _lacking(reason: str) -> None:
    if os.environ.get("REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _start(cluster: Cluster) -> None:
    folder = cluster.folder
    _write_config(cluster)
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
    munged += [f"--socket={folder}/munge.sock", f"--pid-file={folder}/munged.pid"]
    munged += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    cluster.daemons.append(cluster.popen(*munged, log=folder / "munged.out.log"))
    wait_until((folder / "munge.sock").exists, f"munged listens\n{cluster.log()}", 60.0)
    cluster.daemons.append(cluster.popen("slurmctld", "-D", "-i", log=folder / "slurmctld.out.log"))
    for node in NODES:
        apart = APART if cluster.is_apart and node != NODES[0] else ()
        argv = (*apart, "slurmd", "-D", "-N", node)
        cluster.daemons.append(cluster.popen(*argv, log=folder / f"{node}.out.log"))
    states: list[str] = []

    def is_up() -> bool:
        states[:] = cluster("sinfo", "--noheader", "-N", "-o", "%T", check=False).split()
        return states == ["idle", "idle"]

    try:
        wait_until(is_up, "both nodes are idle", 60.0)
    except AssertionError:
        _lacking(f"Slurm does not start here: {states}\n{cluster.log()}")


def _write_config(cluster: Cluster) -> None:
    folder = cluster.folder
    folder.chmod(0o755)
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    user = pwd.getpwuid(os.geteuid()).pw_name
    text = CONF.format(
        host=socket.gethostname(),
        ports=free_ports(3),
        user=user,
        folder=folder,
        gres_types="GresTypes=gpu" if cluster.has_gpus else "",
        gres=" Gres=gpu:4" if cluster.has_gpus else "",
    )
    (folder / "slurm.conf").write_text(text)
    gres = "NodeName=n[1-2] Name=gpu File=/dev/tty[1-4]\n" if cluster.has_gpus else ""
    (folder / "gres.conf").write_text(gres)


def _device_files_are_here() -> bool:
    return all(Path(f"/dev/tty{number}").is_char_device() for number in range(1, 5))


def _can_unshare() -> bool:
    try:
        return subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _stop(cluster: Cluster) -> None:
    for daemon in reversed(cluster.daemons):
        daemon.terminate()
    for daemon in reversed(cluster.daemons):
        try:
            daemon.wait(10.0)
        except subprocess.TimeoutExpired:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
