"""Ports for servers that can only be told a number: nobody is given one of them by the kernel meanwhile."""

import random
import socket
from contextlib import ExitStack

FIRST, LAST = 10_240, 19_999
"""Below the ports that kernels hand out by themselves, on Linux from 32768 on."""


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return ports at which nobody listens at an address, of a random part of the range.

    Raises:
        OSError: there are not so many.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found: list[int] = []
    with ExitStack() as held:
        for port in random.sample(range(FIRST, LAST + 1), LAST + 1 - FIRST):
            if len(found) == count:
                return found
            probe = held.enter_context(socket.socket(family))
            try:
                probe.bind((address, port))
            except OSError:
                continue
            found.append(port)
    raise OSError(f"{len(found)} of {count} ports are free at {address}")
