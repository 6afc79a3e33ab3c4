"""Which TCP ports this process may listen at: the kernel's choice, or those of a range, behind a firewall.

A port of a range is taken by binding it, never probed first: what was free a moment ago may not be. Processes
of one host begin at different places of it, so that they seldom meet.
"""

import errno
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from random import randrange
from typing import TypeVar

from transport.errors import AddressError

T = TypeVar("T")

VARIABLE = "RELAX_ACTOR_PORTS"
"""FIRST-LAST; inherited by everything that a run starts."""

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)


def bind_allowed(bind: Callable[[int], T], environ: Mapping[str, str] = os.environ) -> T:
    """Listen at a port that is allowed.

    Args:
        bind: listens at a port, where 0 is any; fails with EADDRINUSE where somebody else does.
        environ: of this process.

    Returns:
        What `bind` returned.

    Raises:
        AddressError: all ports of the range are taken.
    """
    for port in _allowed(environ):
        try:
            return bind(port)
        except Exception as error:
            if port == 0 or getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
    ports = environ[VARIABLE]
    raise AddressError(f"ports {ports}", "are all taken", "give a wider range, or end what holds them")


def listening_socket(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Listen at a port of one address.

    Args:
        host: an IP address of this host, with its zone where it is link-local, or a name of one.
        port: 0 is any free one.
        backlog: connections that wait to be accepted; None: as Python has it.

    Raises:
        OSError: the host is not this one's, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=backlog)


def _allowed(environ: Mapping[str, str]) -> Iterator[int]:
    match = _RANGE.fullmatch(environ.get(VARIABLE, ""))
    if not match:
        yield 0
        return
    first, last = int(match[1]), int(match[2])
    count = last - first + 1
    start = randrange(count) if count > 0 else 0  # noqa: S311 - spreads processes, hides nothing
    yield from (first + (start + step) % count for step in range(count))
