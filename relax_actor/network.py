"""Which address and which network interface of this host lead to another one."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915
_DISCARD = 9
_ZONE = 3  # its place in an IPv6 socket's address
_IF_INET6 = Path("/proc/net/if_inet6")
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
PROXY_VARIABLES = ("no_proxy", "NO_PROXY")


def source_address(peer: str) -> str:
    """Return this host's address on the way to another one; nothing is sent.

    A link-local address comes with its zone, the interface, without which it leads nowhere.

    Args:
        peer: an IP address or a name.

    Raises:
        OSError: the name is not known, or nothing leads there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(peer, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return _with_zone(probe.getsockname())


def resolved(name: str) -> str:
    """Return the IP address of a host, a link-local one with the zone that the name has.

    Raises:
        OSError: the name is not known.
    """
    return _with_zone(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4])


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of a network interface of this host: IPv4 first, link-local ones left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    return found + [address for address, name in _ipv6_addresses() if name == interface]


def interface_of(address: str) -> str:
    """Return the network interface of this host that has an address; empty where none has."""
    wanted = ipaddress.ip_address(address)
    if zone := getattr(wanted, "scope_id", None):  # it says so itself
        return str(zone)
    for _, name in socket.if_nameindex():
        if wanted in map(ipaddress.ip_address, addresses_of(name)):
            return name
    return ""


def set_environment(
    environ: MutableMapping[str, str], *, peer: str, interface: str, no_proxy: Iterable[str]
) -> None:
    """Have collectives use the interface that leads to a peer, and no proxy stand between hosts of a run.

    What is set already stays: the user knows better.

    Args:
        environ: to be changed.
        peer: an IP address or a name; empty: nothing is asked of the route.
        interface: of this host; empty: by the route to the peer.
        no_proxy: who is spoken to without a proxy, besides those named already.
    """
    if not interface and peer:
        with suppress(OSError, ValueError):
            interface = interface_of(source_address(peer))
    if interface:
        for name in INTERFACE_VARIABLES:
            environ.setdefault(name, interface)
    bypassed = [*filter(None, environ.get("no_proxy", environ.get("NO_PROXY", "")).split(",")), *no_proxy]
    if bypassed:
        for name in PROXY_VARIABLES:
            environ[name] = ",".join(dict.fromkeys(bypassed))


def _with_zone(address: tuple[Any, ...]) -> str:
    """Return the host of a socket's address, as `fe80::1%eth0` where it has a zone."""
    host, zone = str(address[0]), address[3] if len(address) > _ZONE else 0
    return f"{host}%{socket.if_indextoname(zone)}" if zone and "%" not in host else host


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return []
    entries = [line.split() for line in lines]
    found = [(str(ipaddress.IPv6Address(int(entry[0], 16))), entry[-1]) for entry in entries]
    return [(address, name) for address, name in found if not ipaddress.ip_address(address).is_link_local]
