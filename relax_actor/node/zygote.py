"""The process that forks actors: it has imported what they need, has one thread and touches no device.

`python -P -m relax_actor.node.zygote FD AGENT_PID`: requests come over the socket FD as MessagePack
[spawn record, argument frames...]; each is answered by [pid, error]. An actor is forked twice, so that it
becomes a child of the node agent (a subreaper), which watches and reaps it; its death signal is set after
that adoption and is thus bound to the agent's main thread.
"""

import gc
import importlib
import os
import sys
from multiprocessing.connection import Connection

import msgspec

from relax_actor.actor import runtime
from relax_actor.actor.wire import NodeConfig, Spawn
from relax_actor.node.process import await_adoption, die_with_parent, is_single_threaded

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 by the agent while the zygote imports, so that no library starts a pool before the fork."""

SAVED = "RELAX_ACTOR_SAVED_"
"""Prefix of the variables in which the agent keeps the user's own values."""


def main(fd: int, agent: int) -> None:
    """Import, report, then fork an actor a request until the agent closes the socket."""
    die_with_parent(agent)
    connection = Connection(fd)
    config = msgspec.msgpack.decode(connection.recv_bytes(), type=NodeConfig)
    modules = msgspec.msgpack.decode(connection.recv_bytes(), type=list[str])
    connection.send_bytes(msgspec.msgpack.encode(_preload(modules)))
    gc.collect()
    gc.freeze()  # the pages of what is imported stay shared
    while True:
        try:
            spawn, *arguments = msgspec.msgpack.decode(connection.recv_bytes(), type=list[bytes])
        except EOFError:
            return
        record = msgspec.msgpack.decode(spawn, type=Spawn)
        connection.send_bytes(msgspec.msgpack.encode(_fork(connection, agent, config, record, arguments)))


def _preload(modules: list[str]) -> str:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - an import may raise anything; the agent reports it
            return f"the zygote could not import {module}: {type(error).__name__}: {error}"
    if not is_single_threaded():
        return f"importing {', '.join(modules)} started threads, which a fork would lose"
    return ""


def _fork(
    connection: Connection, agent: int, config: NodeConfig, spawn: Spawn, arguments: list[bytes]
) -> tuple[int, str]:
    reader, writer = os.pipe()
    try:
        middle = os.fork()
        if middle == 0:
            _fork_again(writer, connection, agent, config, spawn, arguments)
        os.close(writer)
        writer = -1
        pid = int.from_bytes(os.read(reader, 4), "little")
        os.waitpid(middle, 0)
    except OSError as error:
        return 0, f"fork: {error}"
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    return pid, "" if pid else "fork failed"


def _fork_again(  # noqa: PLR0917 - what the actor needs, handed on once
    writer: int, connection: Connection, agent: int, config: NodeConfig, spawn: Spawn, arguments: list[bytes]
) -> None:
    try:
        actor = os.fork()
        if actor == 0:
            os.close(writer)
            connection.close()
            _become(agent, config, spawn, arguments)
        os.setpgid(actor, actor)  # before its pid is known to anyone
        os.write(writer, actor.to_bytes(4, "little"))
    finally:
        os._exit(0)


def _become(agent: int, config: NodeConfig, spawn: Spawn, arguments: list[bytes]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        await_adoption(agent)
        die_with_parent(agent)
        _redirect(spawn.log)
        _environment(spawn.env)
        gc.unfreeze()
        code = runtime.main(config, spawn, list(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    """Send standard output and error, also of native code, to the incarnation's own log."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - for life
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - for life


def _environment(env: dict[str, str]) -> None:
    for name in THREAD_VARIABLES:
        saved = os.environ.pop(SAVED + name, None)
        os.environ.pop(name, None)
        if saved is not None:
            os.environ[name] = saved
    os.environ.update(env)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
