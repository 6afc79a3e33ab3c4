"""The store in which the ranks of one epoch of a gang find one another: torch's, in rank 0's process.

The port is bound first and told then, so that nobody can take it in between; each epoch has a store of its
own, opened while the one before still has its port. `multi_tenant` has rank 0's own `init_process_group`,
which would open a store at that port, use this one.
"""

import importlib
import importlib.util
import ipaddress
from typing import Any

from transport.ports import bind_allowed, listening_socket


def open_store(host: str) -> tuple[str, Any]:
    """Open a store that listens on one address only.

    Args:
        host: an IP address of this host, or a name of one.

    Returns:
        The `init_method` that leads there, and the store, which is closed when nobody refers to it any
        more; empty and None where torch is not installed.

    Raises:
        OSError: `host` is no address of this host.
    """
    if importlib.util.find_spec("torch") is None:
        return "", None
    distributed: Any = importlib.import_module("torch.distributed")  # only ranks need torch

    listener = bind_allowed(lambda port: listening_socket(host, port))
    port = listener.getsockname()[1]
    store = distributed.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return f"tcp://{_bracketed(host)}:{port}", store


def _bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:  # a name
        return host
