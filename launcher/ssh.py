"""How node agents are started through ssh: one session a host, and nothing of the run on a command line.

The command is the same for every run: `ssh … HOST -- exec PYTHON -P -m relax_actor.node --stdin-frame`.
Everything else (environment, keys, working directory, setup script) goes through the session's standard
input, byte for byte, where neither a shell nor `ps` sees it.
"""

import shlex
import sys
from pathlib import Path

from launcher.hosts import HostEntry
from launcher.options import NetworkOptions, RemoteOptions, SshOptions
from launcher.remote_env import port_variable
from launcher.ssh_causes import RETRY_ON
from relax_actor.supervision.hosts import Host, Session

ALIVE_S, ALIVE_COUNT = 5, 3
"""After so many silences of so long ssh gives a session up."""

FOLDER = "hosts"
"""Of the run folder: where on its own machine a host's actors write, in a folder with its name."""


def prefix(entry: HostEntry, options: SshOptions) -> tuple[str, ...]:
    """Return the command that runs another one on a host.

    Args:
        entry: the host; what it says goes before what all hosts have in common.
        options: of the command line; `options.options` go before ours, since ssh takes the first of a kind.
    """
    port, user = entry.port or options.port, entry.user or options.user
    words = ["ssh", "-T", "-o", "BatchMode=yes"]
    for option in options.options:
        words += ["-o", option]
    for option in (
        f"ConnectTimeout={options.connect_timeout_s}",
        f"ServerAliveInterval={ALIVE_S}",
        f"ServerAliveCountMax={ALIVE_COUNT}",
        "ControlMaster=no",  # one that is there is used, but this session is nobody's master
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
    ):
        words += ["-o", option]
    words += ["-p", str(port)] if port else []
    words += ["-l", user] if user else []
    words += ["-i", options.identity] if options.identity else []
    return (*words, entry.name, "--", "exec")


def quoted(path: str) -> str:
    """Return a path as any login shell takes it; a leading `~/` is left to it."""
    if path.startswith("~/"):
        return f"~/{shlex.quote(path[2:])}"
    return shlex.quote(path)


def host_of(
    entry: HostEntry,
    ssh: SshOptions,
    session: Session,
    *,
    remote: RemoteOptions,
    address: str,
    folder: Path,
) -> Host:
    """Return a host that is reached through ssh.

    Args:
        entry: as the user named it.
        ssh: how it is reached where its line does not say.
        session: what its actors start in.
        remote: names the interpreter.
        address: where its actors take calls of other hosts.
        folder: the run folder on the head.
    """
    return Host(
        name=entry.label,
        prefix=prefix(entry, ssh),
        address=address,
        python=quoted(remote.python or sys.executable),
        run_dir=str(folder / FOLDER / entry.label),
        session=session,
    )


def session_of(
    entry: HostEntry, remote: RemoteOptions, network: NetworkOptions, no_proxy: tuple[str, ...]
) -> Session:
    """Return what a host's actors start in.

    Args:
        entry: the host.
        remote: what all of them start in.
        network: names the interface of a host whose line names none, and the ports.
        no_proxy: the hosts of the run.
    """
    return Session(
        workdir=remote.workdir or str(Path.cwd()),
        env=environment(remote, network),
        setup=remote.setup,
        interface=entry.interface or network.interface,
        no_proxy=no_proxy,
        retry_on=RETRY_ON,
    )


def environment(
    remote: RemoteOptions,
    network: NetworkOptions = NetworkOptions(),  # noqa: B008 - frozen
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the variables of `-x` and `--env-file`, byte for byte, and that of the ports."""
    variables = port_variable(network.ports) | dict(remote.env)
    return tuple((_bytes(name), _bytes(value)) for name, value in variables.items())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
