"""Hosts as data, and which of them an actor is started on."""

import re
import sys
from collections.abc import Collection, Sequence

import msgspec

from relax_actor.supervision.spec import ChildSpec, Home, SpecError, SupervisorSpec
from transport.address import Address
from transport.errors import AddressError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What the actors of a host start in, and what its node agent hands over; see `node.porter`.

    All of it goes to the host through the session's standard input. Values of `env` are secrets.
    """

    workdir: str = ""
    """Absolute; empty: where the prefix leads."""
    env: tuple[tuple[bytes, bytes], ...] = ()
    """Environment variables, byte for byte."""
    setup: str = ""
    """A shell script that is sourced before the agent starts, with `env` and in `workdir`."""
    interface: str = ""
    """The network interface of collectives; empty: by the route to the head."""
    no_proxy: tuple[str, ...] = ()
    """Hosts that are spoken to without a proxy."""
    retry_on: str = ""
    """A regular expression: a start whose output matches it is tried again, such as a connection reset."""

    def __repr__(self) -> str:
        return f"Session(workdir={self.workdir!r}, {len(self.env)} variables)"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs actors, and how a node agent gets there."""

    name: str
    prefix: tuple[str, ...] = ()
    """The command that runs another one there, such as `("ssh", "node7", "--", "exec")`; none: this host."""
    address: str = ""
    """Where its actors take calls of other hosts: an IP address or a name; not needed with one host."""
    python: str = ""
    """The interpreter there; empty: the head's own path."""
    run_dir: str = ""
    """Where logs and crash reports of its actors go; empty: the head's folder, at the same path."""
    shm_root: str = ""
    """Where its shared-memory segments live; empty: as on the head."""
    term_is_for_head: bool = False
    """Whether its agent and actors take no notice of SIGTERM: who sends it there means the head as well."""
    session: Session | None = None
    """What its actors start in. With one, its events, logs and crash reports are handed over to the head, so
    that `run_dir` must be a folder of its own. Without a prefix only the environment is of use."""

    @property
    def is_handed_over(self) -> bool:
        """Whether the files of its run folder come to the head's."""
        return bool(self.prefix) and self.session is not None

    @property
    def interpreter(self) -> str:
        """The path of the interpreter."""
        return self.python or sys.executable


LOCAL = Host(name="local")
"""The only host of a tree that names none."""


def check_hosts(hosts: Sequence[Host], address: str) -> None:
    """Check hosts before anything starts.

    Args:
        hosts: all of them.
        address: the head's own, where agents on other hosts find it.

    Raises:
        SpecError: a bad name, one used twice, or an address that is missing or no address.
    """
    names = [host.name for host in hosts]
    for index, host in enumerate(hosts):
        where = f"hosts[{index}]"
        if not _NAME.fullmatch(host.name):
            raise SpecError(f"{where}.name", f"is {host.name!r}; letters, digits, `.`, `_` and `-`")
        if names.count(host.name) > 1:
            raise SpecError(f"{where}.name", f"is {host.name!r} twice")
        if len(hosts) > 1 or host.prefix:
            _check_address(f"{where}.address", host.address)
    if any(host.prefix for host in hosts):
        _check_address("address", address)


def check_placement(spec: SupervisorSpec | ChildSpec, names: Collection[str]) -> None:
    """Check that every child names hosts that are there.

    Raises:
        SpecError: one that is not.
    """
    if isinstance(spec, SupervisorSpec):
        for child in spec.children:
            check_placement(child, names)
        return
    for host in (*spec.hosts, *(home.host for home in spec.homes)):
        if host not in names:
            raise SpecError(f"{spec.id}.hosts", f"names {host!r}; there are {', '.join(sorted(names))}")


def choose(candidates: Sequence[str], replica: int, joined: Collection[str]) -> str:
    """Return the host for a replica: the hosts in turn, past those that are not joined.

    Where none is joined it is the one whose turn it is: it may come back.
    """
    turn = [candidates[(replica + step) % len(candidates)] for step in range(len(candidates))]
    return next((host for host in turn if host in joined), turn[0])


def choose_home(
    homes: Sequence[Home], replica: int, replicas: int, joined: Collection[str], taken: Collection[Home]
) -> Home:
    """Return the place for a replica: its own, or while that host is away another one with room.

    Where there is none it is its own: the host may come back.

    Args:
        homes: a place for each replica, then the spare ones.
        replica: whose place.
        replicas: how many there are.
        joined: the hosts that are there.
        taken: the places that actors have now.
    """
    own = homes[replica]
    if own.host in joined:
        return own
    for step in range(1, len(homes)):
        index = (replica + step) % len(homes)
        home = homes[index]
        has_room = not home.devices or (index >= replicas and home not in taken)
        if home.host in joined and has_room:
            return home
    return own


def _check_address(where: str, address: str) -> None:
    if not address:
        raise SpecError(where, "is empty; other hosts need an IP address or a name to reach it by")
    try:
        Address.tcp(address)
    except AddressError as error:
        raise SpecError(where, str(error)) from None
