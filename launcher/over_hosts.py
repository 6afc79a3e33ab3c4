"""The hosts of a launch as the supervision tree takes them, and where they reach the head."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from launcher import slurm_hosts
from launcher.errors import ExitCode
from launcher.hosts import HostEntry
from launcher.options import Launcher, LaunchOptions, SshOptions
from launcher.slurm_words import SlurmError
from launcher.ssh import environment, host_of, prefix, session_of
from launcher.ssh_causes import Attempt, SshCause, SshError, explain
from relax_actor import network
from relax_actor.placement import Placement
from relax_actor.supervision.hosts import Host, Session
from relax_actor.telemetry import Event

SSH_G_S = 10.0
"""How long ssh may take to say what its configuration makes of a name."""


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run takes place."""

    hosts: tuple[Host, ...] = ()  # none: this machine alone
    address: str = ""  # where the other hosts reach this program


def reach(options: LaunchOptions, folder: Path, placement: Placement | None) -> Reached:
    """Return the hosts of a launch, in the order of its placement; see `hosts_of`."""
    if options.launcher is Launcher.LOCAL:
        return Reached()
    if options.launcher is Launcher.SLURM:
        given = slurm_hosts.allocation(os.environ)
        found, address = slurm_hosts.hosts_of(options, given, folder, os.environ)
        reached = Reached(hosts=found, address=address)
    else:
        reached = hosts_of(options, folder)
    order = placement.hosts if placement is not None else ()
    hosts = sorted(
        reached.hosts, key=lambda host: order.index(host.name) if host.name in order else len(order)
    )
    return msgspec.structs.replace(reached, hosts=tuple(hosts))


def hosts_of(options: LaunchOptions, folder: Path) -> Reached:
    """Return the hosts of a launch through ssh.

    Args:
        options: with at least one host.
        folder: the run folder.

    Raises:
        SshError: a name is not known, or no route leads to it.
    """
    entries = options.hosts
    addresses = {entry.label: address_of(entry, options.ssh) for entry in entries}
    interface = options.network.interface
    address = options.network.master_addr or _head_address(entries, addresses, interface)
    no_proxy = tuple(
        dict.fromkeys(("localhost", "127.0.0.1", address, *_names(entries), *addresses.values()))
    )
    hosts = []
    for entry in entries:
        if entry.is_here:
            hosts.append(_here(entry, options, address))
            continue
        session = session_of(entry, options.remote, options.network, no_proxy)
        where = addresses[entry.label]
        hosts.append(
            host_of(entry, options.ssh, session, remote=options.remote, address=where, folder=folder)
        )
    _prepare_this_process(entries, addresses, interface, no_proxy)
    return Reached(hosts=tuple(hosts), address=address)


def address_of(entry: HostEntry, options: SshOptions) -> str:
    """Return where a host's actors take calls: what its line says, else what ssh makes of its name.

    Raises:
        SshError: the name is not known.
    """
    if entry.address or entry.is_here:
        return entry.address
    name = _configured_name(entry, options)
    try:
        return network.resolved(name)
    except OSError as error:
        fact = f"{name}: {error.strerror}; its line may say where it is: addr=10.0.0.2"
        raise SshError(entry.name, SshCause.NAME, fact) from None


def attempts(events: Iterable[Event], entries: Sequence[HostEntry]) -> list[Attempt]:
    """Return the newest failed try of each host that has not joined since.

    Args:
        events: of the run.
        entries: its hosts, as the user wrote them.
    """
    names = {entry.label: entry.name for entry in entries}
    found: dict[str, Attempt] = {}
    for event in events:
        host = str(event.get("host", ""))
        if event.get("kind") == "host_joined":
            found.pop(host, None)
        elif event.get("kind") == "host_not_reached" and host in names:
            found[host] = _attempt(event, names[host])
    return list(found.values())


def problems(events: Iterable[Event], options: LaunchOptions) -> Sequence[SshError | SlurmError]:
    """Return for each host that could not be reached why."""
    found = attempts(events, options.hosts)
    return [explained(attempt, options) for attempt in found]


def explained(attempt: Attempt, options: LaunchOptions) -> SshError | SlurmError:
    """Return why a host could not be reached, or used as it is."""
    if options.launcher is Launcher.SLURM:
        return slurm_hosts.problem_of(attempt.host, attempt.output, attempt.fact)
    return explain(attempt)


def exit_code(events: Iterable[Event], code: int) -> int:
    """Return a run's exit code: 3 where it failed since a host was not reached and nothing was started."""
    kinds = {str(event.get("kind")) for event in events}
    is_start = "host_not_reached" in kinds and "child_spawned" not in kinds
    return ExitCode.PREFLIGHT if code == ExitCode.RUN_FAILED and is_start else code


def _attempt(event: Event, name: str) -> Attempt:
    code = event.get("code")
    return Attempt(
        host=name,
        code=code if isinstance(code, int) else None,
        output=str(event.get("output", "")),
        answered=bool(event.get("answered")),
        refusal=str(event.get("refusal", "")),
        fact=str(event.get("fact", "")),
    )


def _here(entry: HostEntry, options: LaunchOptions, address: str) -> Host:
    """Return this machine: no session is needed, and its actors start where the launcher is."""
    session = Session(env=environment(options.remote))
    return Host(name=entry.label, address=entry.address or address, session=session)


def _head_address(entries: Sequence[HostEntry], addresses: Mapping[str, str], interface: str) -> str:
    """Return this machine's address on the way to the other hosts, by the routes of most of them."""
    if interface and (own := network.addresses_of(interface)):
        return own[0]
    found = Counter[str]()
    for entry in entries:
        if not entry.is_here:
            try:
                found[network.source_address(addresses[entry.label])] += 1
            except OSError as error:
                raise SshError(entry.name, SshCause.ROUTE, str(error)) from None
    return found.most_common(1)[0][0] if found else "127.0.0.1"


def _prepare_this_process(
    entries: Sequence[HostEntry], addresses: Mapping[str, str], interface: str, no_proxy: Iterable[str]
) -> None:
    """Have this host's actors, which inherit this environment, use the interface that leads to the others."""
    others = [addresses[entry.label] for entry in entries if not entry.is_here]
    own = next((entry.interface for entry in entries if entry.is_here and entry.interface), interface)
    network.set_environment(os.environ, peer=others[0] if others else "", interface=own, no_proxy=no_proxy)


def _names(entries: Sequence[HostEntry]) -> list[str]:
    return [entry.name for entry in entries]


def _configured_name(entry: HostEntry, options: SshOptions) -> str:
    """Return the host name that ssh would connect to: an alias of ~/.ssh/config stands for another."""
    command = [*prefix(entry, options)[:-3], "-G", entry.name]
    if shutil.which("ssh") is None:
        return entry.name
    with suppress(subprocess.TimeoutExpired):
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SSH_G_S)
        words = (line.partition(" ") for line in said.stdout.splitlines())
        return next((value for key, _, value in words if key == "hostname"), entry.name)
    return entry.name
