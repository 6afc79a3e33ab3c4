"""An actor in an interpreter of its own, for environments that no zygote fits.

`PYTHON -P -m relax_actor.node.exec FD AGENT_PID PIPE`: the file FD holds, as MessagePack, [configuration,
spawn record, argument frames...]. The same rules of life and death hold as for an actor that a zygote forked.
"""

import os
import sys
from collections.abc import Sequence

import msgspec

from relax_actor.actor.wire import NodeConfig, Spawn
from relax_actor.node import birth
from transport.control import Frames


def start(config: NodeConfig, spawn: Spawn, arguments: Frames, *, pipe: int) -> tuple[int, str]:
    """Start the interpreter; return its pid and no error, or 0 and the error."""
    parts = [msgspec.msgpack.encode(config), msgspec.msgpack.encode(spawn), *map(bytes, arguments)]
    letter = os.memfd_create("spawn")  # read when the child is ready to: the agent never waits for it
    try:
        with os.fdopen(letter, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(parts))
        return _start(spawn.python or sys.executable, letter, pipe), ""
    except OSError as error:
        return 0, f"{spawn.python or sys.executable}: {error.strerror}"
    finally:
        os.close(letter)


def main(arguments: Sequence[str]) -> None:
    """Read what to be, and be it."""
    letter, agent, pipe = map(int, arguments)
    with os.fdopen(letter, "rb") as file:
        file.seek(0)
        config, spawn, *frames = msgspec.msgpack.decode(file.read(), type=list[bytes])
    birth.become(
        msgspec.msgpack.decode(config, type=NodeConfig),
        msgspec.msgpack.decode(spawn, type=Spawn),
        frames,
        agent=agent,
        pipe=pipe,
    )


def _start(python: str, letter: int, pipe: int) -> int:
    """Start it in a process group of its own; it inherits the two files and nothing else but the log."""
    command = [python, "-P", "-m", __name__, str(letter), str(os.getpid()), str(pipe)]
    inherited = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (letter, pipe)]  # onto itself: not closed at exec
    return os.posix_spawn(python, command, os.environ, file_actions=inherited, setpgroup=0)


if __name__ == "__main__":
    main(sys.argv[1:])
