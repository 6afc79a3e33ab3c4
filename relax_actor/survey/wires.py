"""How a host is connected: its interfaces and its name, and whether it reaches other hosts."""

import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from relax_actor import network
from relax_actor.survey.records import Interface, Reached, Targets

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
HELLO = b"relax-actor?\n"
ANSWER = b"relax-actor!\n"
TRIES = 64
PARALLEL = 32
_IFF_UP = 1


def interfaces(root: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """Return the network interfaces of this host."""
    found = []
    for _, name in socket.if_nameindex():
        flags = 0
        with suppress(OSError, ValueError):
            flags = int((root / name / "flags").read_text(), 16)
        addresses = tuple(network.addresses_of(name))
        found.append(Interface(name=name, is_up=bool(flags & _IFF_UP), addresses=addresses))
    return tuple(found)


def loopback_line(node: str, hosts: Path = Path("/etc/hosts")) -> str:
    """Return the line of /etc/hosts that has a host's own name lead to the loopback, or nothing."""
    with suppress(OSError):
        for line in hosts.read_text("utf-8", "replace").splitlines():
            words = line.partition("#")[0].split()
            if len(words) > 1 and node in words[1:] and (words[0].startswith("127.") or words[0] == "::1"):
                return line.strip()
    return ""


def proxies(environ: Mapping[str, str] = os.environ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the variables that name a proxy, whose values may be secrets, and the hosts it is not for."""
    names = [name for each in PROXIES for name in (each, each.upper()) if environ.get(name)]
    spared = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    return tuple(names), tuple(item.strip() for item in spared.split(",") if item.strip())


class Listener:
    """Answers who connects, until it is closed.

    Args:
        ports: first and last of those it may take; None: the kernel's choice.

    Raises:
        OSError: none of them is free.
    """

    def __init__(self, ports: tuple[int, int] | None = None) -> None:
        self._socket = _bound(ports)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                peer, _ = self._socket.accept()
                with peer, suppress(OSError):
                    peer.settimeout(2.0)
                    if peer.recv(len(HELLO), socket.MSG_WAITALL) == HELLO:
                        peer.sendall(ANSWER)


def reached(targets: Targets) -> Reached:
    """Try to reach other hosts, many at once; return which could not be, and why."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        tried = pool.map(
            lambda target: _failure(target[0], target[1], targets.timeout_s), targets.addresses.values()
        )
        failures = dict(zip(targets.addresses, tried, strict=True))
    return Reached(failures={name: why for name, why in failures.items() if why})


def _failure(address: str, port: int, timeout_s: float) -> str:
    try:
        with socket.create_connection((address, port), timeout_s) as peer:
            peer.sendall(HELLO)
            said = peer.recv(len(ANSWER), socket.MSG_WAITALL)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if said == ANSWER else "somebody else answers there"


def _bound(ports: tuple[int, int] | None) -> socket.socket:
    refusal: OSError | None = None
    for port in _candidates(ports):
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except (OSError, ValueError) as error:
            refusal = error if isinstance(error, OSError) else refusal
        with suppress(OSError):
            return socket.create_server(("", port), backlog=1024)
    raise refusal or OSError("no port is free")


def _candidates(ports: tuple[int, int] | None) -> Iterator[int]:
    if ports is None:
        yield 0
        return
    first, last = ports
    count = last - first + 1
    start = secrets.randbelow(count)
    for step in range(min(count, TRIES)):
        yield first + (start + step) % count
