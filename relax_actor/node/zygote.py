"""The process that forks actors: it has imported what they need, has one thread and touches no device.

`python -P -m relax_actor.node.zygote FD AGENT_PID PIPE`, or a fork of the agent (see `zygotes`): requests
come over the socket FD as MessagePack [spawn record, argument frames...]; each is answered by [pid, error].

An actor is a fork of a fork, which ends and so leaves it to the node agent (a subreaper) to watch and reap;
its death signal is set after that adoption and is thus bound to the agent's main thread. Requests that came
together share the process between: a fork costs milliseconds where torch is loaded. What is imported stays
frozen in the actor, too: a collection that looked at it would copy every page of it.

PIPE is the read end of the agent's death pipe.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec

from relax_actor.actor.wire import NodeConfig, Spawn
from relax_actor.node import birth, preload
from relax_actor.node.process import die_with_parent, die_with_pipe

TOGETHER = 8
"""Actors that share the process between: they are adopted when the last of them is forked."""


def main(fd: int, agent: int, pipe: int) -> None:
    """Import, report, then fork an actor a request until the agent closes the socket."""
    die_with_parent(agent)
    die_with_pipe(pipe)
    connection = Connection(fd)
    config = msgspec.msgpack.decode(connection.recv_bytes(), type=NodeConfig)
    modules = msgspec.msgpack.decode(connection.recv_bytes(), type=list[str])
    connection.send_bytes(msgspec.msgpack.encode(preload.load(modules)))
    gc.collect()
    gc.freeze()  # the pages of what is imported stay shared
    while requests := _waiting(connection):
        births = [partial(_be_born, config, request, agent, pipe) for request in requests]
        for answer in _fork(connection, births):
            connection.send_bytes(msgspec.msgpack.encode(answer))


def _waiting(connection: Connection) -> list[bytes]:
    """Return the requests that are here, at least one; none once the agent has closed the socket."""
    try:
        requests = [connection.recv_bytes()]
        while len(requests) < TOGETHER and connection.poll():
            requests.append(connection.recv_bytes())
    except EOFError:
        return []
    return requests


def _fork(connection: Connection, births: Sequence[Callable[[], None]]) -> Iterator[tuple[int, str]]:
    """Fork an actor for each, by way of a process between; yield their pids as they come."""
    reader, writer = os.pipe()
    error = "fork failed"
    try:
        middle = os.fork()
        if middle == 0:
            os.close(reader)
            _fork_again(writer, connection, births)
    except OSError as failure:
        middle, error = 0, f"fork: {failure}"
    os.close(writer)
    for _ in births:
        pid = int.from_bytes(os.read(reader, 4), "little")
        yield pid, "" if pid else error
    os.close(reader)
    if middle:
        os.waitpid(middle, 0)


def _fork_again(writer: int, connection: Connection, births: Sequence[Callable[[], None]]) -> NoReturn:
    try:
        for born in births:
            actor = os.fork()
            if actor == 0:
                os.close(writer)
                connection.close()
                born()
            with suppress(OSError):  # it has ended already
                os.setpgid(actor, actor)  # before its pid is known to anyone
            os.write(writer, actor.to_bytes(4, "little"))
    finally:
        os._exit(0)


def _be_born(config: NodeConfig, request: bytes, agent: int, pipe: int) -> None:
    preload.restore_environment()
    spawn, *arguments = msgspec.msgpack.decode(request, type=list[bytes])
    record = msgspec.msgpack.decode(spawn, type=Spawn)
    birth.become(config, record, arguments, agent=agent, pipe=pipe)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
