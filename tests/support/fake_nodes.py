"""How the nodes of a server that is spread over hosts meet, live and die together, as SGLang's do.

The first node listens at the meeting place and tells the others what to do; whoever loses another one ends.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

JOIN_S = 30.0


def say_and_exit(why: str) -> None:
    """End this process, and say why in its log."""
    sys.stdout.write(f"{why}\n")
    sys.stdout.flush()
    os._exit(1)


class FirstNode:
    """The first of several nodes: returns from its constructor when all have come.

    Args:
        where: the meeting place.
        nodes: how many there are.
    """

    def __init__(self, where: str, nodes: int) -> None:
        host, _, port = where.rpartition(":")
        self._others = []
        with socket.create_server((host, int(port))) as listener:
            while len(self._others) < nodes - 1:
                self._others.append(listener.accept()[0])
        for other in self._others:
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()
        self._group: Any = None

    def _watch(self, other: socket.socket) -> None:
        other.recv(1)
        say_and_exit("Connection closed by peer: a node has gone")

    def init_group(self, invitation: dict[str, Any]) -> None:
        """Join a group with all nodes."""
        self._tell({"init": invitation})
        self._group = joined(invitation, node=0)

    def receive(self, body: dict[str, Any]) -> None:
        """Take a bucket."""
        self._tell({"receive": body})
        receive(self._group, body)

    def _tell(self, order: dict[str, Any]) -> None:
        for other in self._others:
            other.sendall(json.dumps(order).encode() + b"\n")


def further_node(where: str, node: int) -> None:
    """Be one of the others, until the first one goes."""
    host, _, port = where.rpartition(":")
    group: Any = None
    with connected(host, int(port)) as first, first.makefile() as orders:
        sys.stdout.write("met the first node\n")
        sys.stdout.flush()
        for line in orders:
            order = json.loads(line)
            if "init" in order:
                group = joined(order["init"], node)
            else:
                receive(group, order["receive"])
    say_and_exit("Connection closed by peer: the first node has gone")


def connected(host: str, port: int) -> socket.socket:
    """Come to the meeting place, which may not be open yet."""
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            time.sleep(0.02)


def joined(invitation: dict[str, Any], node: int) -> Any:
    """Join a group, as SGLang does: below torch.distributed's public face."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    size, rank = invitation["world_size"], invitation["rank_offset"] + node
    store = dist.TCPStore(
        invitation["master_address"], invitation["master_port"], size, timeout=timedelta(seconds=JOIN_S)
    )
    name = invitation["group_name"]
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(invitation["backend"]),
        c10d.PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timedelta(seconds=JOIN_S),
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def receive(group: Any, body: dict[str, Any]) -> None:
    """Take part in the broadcast of a bucket."""
    import torch
    import torch.distributed as dist

    sizes = (
        math.prod(shape) * getattr(torch, dtype).itemsize
        for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
    )
    dist.broadcast(torch.empty(sum(sizes), dtype=torch.uint8), src=0, group=group)
