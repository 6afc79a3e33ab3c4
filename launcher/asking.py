"""Turns the words of a command line about hosts, ssh, the network and Slurm into `LaunchOptions`.

All that is wrong is found before any of it is reported. Files that options name are read here, once: the
hostfile, the environment file and the setup script; nothing else is touched, and nothing leaves this host.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from launcher import hostfile
from launcher.errors import RefusedError
from launcher.hostlist import MAX_HOSTS
from launcher.hosts import HostEntry
from launcher.hostwords import KEYS, WordError, read_address
from launcher.options import (
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_FANOUT,
    GpuOptions,
    Launcher,
    LaunchOptions,
    Layout,
    NetworkOptions,
    Order,
    Preflight,
    Rehearsal,
    Selection,
    SlurmOptions,
    SshOptions,
)
from launcher.remote_env import remote
from launcher.selecting import parse_picked, select
from launcher.words import WordReader, Words
from relax_actor.errors import ConfigError

SSH_ONLY = ("--ssh-port", "--user", "--identity", "--ssh-opt", "--fanout", "--connect-timeout")
"""Options of ssh."""

FAR_ONLY = (
    *SSH_ONLY,
    "--workdir",
    "--venv",
    "--remote-python",
    "--setup",
    "--master-addr",
    "--ifname",
    "--port-range",
)
"""Options that mean nothing where the only host is this one."""

PICKING = ("--include", "--exclude", "--num-nodes")
"""Options that choose among hosts that are named."""

SUBMIT_ONLY = ("--nodes", "--partition", "--account", "--time", "--sbatch-opt", "--requeue")
"""Options of a job that is submitted."""


class _Wish(StrEnum):
    """What `--launcher` may say."""

    AUTO = "auto"
    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"


_SSH_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*=.+")
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_SBATCH_OPTION = re.compile(r"[a-z][a-z0-9-]*(=[^\n\r]*)?")
_SBATCH_WORD = re.compile(r"[A-Za-z0-9_.,:+@%/-]+")


def ask(words: Words, environ: Mapping[str, str], *, has_srun: bool | None = None) -> LaunchOptions:
    """Read and check everything that was said about hosts.

    Args:
        words: as the command line has them.
        environ: this process' environment: `-x NAME` takes values from it, and it tells of an allocation.
        has_srun: whether Slurm's commands are here; looked up if None.

    Raises:
        RefusedError: what is wrong, everything at once.
    """
    reader = WordReader(words)
    srun = shutil.which("srun") is not None if has_srun is None else has_srun
    job_id = environ.get("SLURM_JOB_ID", "") if srun else ""
    nobody: tuple[HostEntry, ...] = ()
    named = reader.checked(lambda: _named_hosts(words), nobody)
    selection = _selection(reader)
    launcher = _launcher(reader, named, job_id)
    network = _network(reader)
    options = LaunchOptions(
        launcher=launcher,
        hosts=reader.checked(lambda: select(named, selection), nobody) if named else nobody,
        selection=selection,
        gpus=_gpus(reader),
        ssh=_ssh(reader),
        remote=remote(reader, environ, network.ports),
        network=network,
        slurm=_slurm(reader, job_id),
        preflight=reader.member("--preflight", Preflight, Preflight.QUICK),
        rehearsal=reader.member("--dry-run", Rehearsal, Rehearsal.NO),
        log_dir=reader.here("--log-dir"),
    )
    if named or not _names_hosts(reader):  # else it is not known which options are idle
        _refuse_idle(reader, launcher)
    if reader.problems:
        raise RefusedError(reader.problems)
    return options


def _named_hosts(words: Words) -> tuple[HostEntry, ...]:
    path, listed = words.get("--hostfile"), words.get("--hosts")
    if path is not None and listed is not None:
        raise ConfigError(
            "--hosts", "is given beside --hostfile", "leave one out; --include picks from a file"
        )
    if path is not None:
        return hostfile.read(Path(path).expanduser())
    return hostfile.parse_hosts(listed) if listed is not None else ()


def _selection(reader: WordReader) -> Selection:
    include, exclude = reader.text("--include"), reader.text("--exclude")
    if include and exclude:
        reader.complain("--exclude", "is given beside --include", "leave one out")
        exclude = ""
    return Selection(
        include=reader.checked(lambda: parse_picked(include, "--include"), ()) if include else (),
        exclude=reader.checked(lambda: parse_picked(exclude, "--exclude"), ()) if exclude else (),
        num_nodes=reader.number("--num-nodes", most=MAX_HOSTS),
        gpus_per_node=reader.number("--gpus-per-node", most=1024, auto=True),
    )


def _launcher(reader: WordReader, named: Sequence[HostEntry], job_id: str) -> Launcher:
    """Decide what starts the agents; a job that is submitted is Slurm's."""
    wish = reader.member("--launcher", _Wish, _Wish.AUTO)
    submit = reader.flag("--slurm")
    far = [host for host in named if not host.is_here]
    if wish is _Wish.AUTO:
        if job_id or submit:
            return Launcher.SLURM
        return Launcher.SSH if far else Launcher.LOCAL
    if wish is _Wish.LOCAL and far:
        reader.complain("--launcher", f"is local, but {far[0].name} is another host", "use ssh, or auto")
    elif wish is _Wish.SSH and not named:
        reader.complain("--launcher", "is ssh, but no host is named", "give -H FILE or --hosts a:8,b:8")
    elif wish is _Wish.SLURM and not (job_id or submit):
        hint = "run it inside salloc or sbatch, or give --slurm to submit a job"
        reader.complain(
            "--launcher", "is slurm, but this is no allocation (SLURM_JOB_ID or srun is missing)", hint
        )
    if submit and wish is not _Wish.SLURM:
        reader.complain("--slurm", f"submits a job, but --launcher is {wish}", "leave --launcher out")
    return Launcher(wish)


def _gpus(reader: WordReader) -> GpuOptions:
    total, train, rollout = (reader.number(option) for option in ("--gpus", "--train-gpus", "--rollout-gpus"))
    if total and (train or rollout):
        reader.complain("--gpus", "is given beside --train-gpus or --rollout-gpus", "leave it out")
    layout = Layout.COLOCATE if reader.flag("--colocate") else Layout.SEPARATE
    if layout is Layout.COLOCATE and (train or rollout):
        given = "--train-gpus" if train else "--rollout-gpus"
        reader.complain(given, "has no meaning with --mode colocate, where both use all", "use --gpus N")
    order = reader.member("--placement", Order, Order.SPREAD)
    return GpuOptions(layout=layout, order=order, total=total, train=train, rollout=rollout)


def _ssh(reader: WordReader) -> SshOptions:
    for text in reader.texts("--ssh-opt"):
        if not _SSH_OPTION.fullmatch(text):
            reader.complain(
                "--ssh-opt", f"must be KEY=VALUE, got `{text}`", "as in `man ssh_config`: ProxyJump=gate"
            )
    identity = reader.here("--identity")
    if identity and not Path(identity).is_file():
        reader.complain("--identity", f"is no file: {identity}")
    return SshOptions(
        port=reader.number("--ssh-port", most=65_535),
        user=_word(reader, "--user", KEYS["user"]),
        identity=identity,
        options=reader.texts("--ssh-opt"),
        fanout=reader.number("--fanout", DEFAULT_FANOUT, most=1024),
        connect_timeout_s=reader.number("--connect-timeout", DEFAULT_CONNECT_TIMEOUT_S, most=3600),
    )


def _network(reader: WordReader) -> NetworkOptions:
    return NetworkOptions(
        master_addr=_word(reader, "--master-addr", read_address),
        interface=_word(reader, "--ifname", KEYS["ifname"]),
        ports=_ports(reader),
    )


def _word(reader: WordReader, option: str, read: Callable[[str], str]) -> str:
    """Return a word that a hostfile may have, too; empty for `auto`."""
    text = reader.text(option)
    if text == "auto" or not reader.is_given(option):
        return ""
    try:
        return read(text)
    except WordError as error:
        reader.complain(option, error.fact, error.hint)
        return ""


def _ports(reader: WordReader) -> tuple[int, int] | None:
    text = reader.text("--port-range")
    if not reader.is_given("--port-range"):
        return None
    match = _PORTS.fullmatch(text)
    if not match or not 1024 <= int(match[1]) <= int(match[2]) <= 65_535:
        reader.complain(
            "--port-range", f"must be FIRST-LAST, from 1024 to 65535, got `{text}`", "20000-29999"
        )
        return None
    return int(match[1]), int(match[2])


def _slurm(reader: WordReader, job_id: str) -> SlurmOptions:
    if job_id and reader.flag("--slurm"):
        reader.complain(
            "--slurm", f"submits a job, but this is allocation {job_id} already", "leave --slurm out"
        )
    for text in reader.texts("--sbatch-opt"):
        if not _SBATCH_OPTION.fullmatch(text):
            reader.complain("--sbatch-opt", f"must be KEY or KEY=VALUE, got `{text}`", "for example qos=high")
    return SlurmOptions(
        submit=reader.flag("--slurm"),
        job_id=job_id,
        nodes=reader.number("--nodes", most=MAX_HOSTS),
        partition=_one_line(reader, "--partition"),
        account=_one_line(reader, "--account"),
        time=_one_line(reader, "--time"),
        options=reader.texts("--sbatch-opt"),
        requeue=reader.flag("--requeue"),
    )


def _one_line(reader: WordReader, option: str) -> str:
    """Return a word that becomes a part of an `#SBATCH` line."""
    text = reader.text(option)
    if reader.is_given(option) and not _SBATCH_WORD.fullmatch(text):
        reader.complain(option, f"must be one word, got `{text}`")
    return text


def _refuse_idle(reader: WordReader, launcher: Launcher) -> None:
    """Refuse options that would change nothing: somebody counts on them."""
    for option in SUBMIT_ONLY:
        if reader.is_given(option) and not reader.flag("--slurm"):
            reader.complain(option, "is for a job that is submitted", "give --slurm, too")
    for option in FAR_ONLY if launcher is Launcher.LOCAL else ():
        if reader.is_given(option):
            reader.complain(
                option, "is for other hosts, and none is named", "give -H FILE or --hosts a:8,b:8"
            )
    for option in SSH_ONLY if launcher is Launcher.SLURM else ():
        if reader.is_given(option):
            reader.complain(
                option, "is for ssh, but Slurm starts the agents", "leave it out, or --launcher ssh"
            )
    for option in PICKING:
        if reader.is_given(option) and launcher is Launcher.LOCAL and not _names_hosts(reader):
            reader.complain(option, "picks from hosts, and none is named", "give -H FILE or --hosts a:8,b:8")


def _names_hosts(reader: WordReader) -> bool:
    return reader.is_given("--hostfile") or reader.is_given("--hosts")
