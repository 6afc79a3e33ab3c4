"""How a fresh process becomes an actor, whether a zygote forked it or an interpreter was started for it.

What takes its time goes on beside the actor's own start, and is over before any code of the user runs: the
move into the control group, for which the kernel waits until every processor has passed by (8 ms), and the
adoption by the agent, which comes when the process between has ended.
"""

import io
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from relax_actor.actor import runtime
from relax_actor.actor.wire import NodeConfig, Spawn
from relax_actor.node import cgroup, strays
from relax_actor.node.process import await_adoption, die_with_parent, die_with_pipe
from transport.control import Frames


def become(config: NodeConfig, spawn: Spawn, arguments: Frames, *, agent: int, pipe: int) -> NoReturn:
    """Be this actor until it ends, and end the process with it.

    Args:
        config: what all processes of the run have in common.
        spawn: which actor.
        arguments: its packed arguments.
        agent: pid of the node agent, whose child this process is or soon will be.
        pipe: read end of the agent's death pipe.
    """
    code = 1
    try:
        with suppress(PermissionError):  # one that has been exec'ed leads its group already
            os.setpgid(0, 0)
        die_with_pipe(pipe)
        move = threading.Thread(target=cgroup.enter, args=(spawn.cgroup,), name="cgroup")
        move.start()
        _redirect(spawn.log)
        _set_oom_score(spawn.oom_score_adj)
        _set_environment(config, spawn, agent)
        code = runtime.main(config, spawn, arguments, partial(_settle, agent, move))
    finally:
        with suppress(Exception):  # nothing may keep this process from saying how it ended
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _settle(agent: int, move: threading.Thread) -> None:
    """Return once this process is where it belongs; main thread, which the death signal is bound to."""
    await_adoption(agent)
    die_with_parent(agent)
    move.join()


def _redirect(log: str) -> None:
    """Send standard output and error, also of native code, to the incarnation's own log."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(out)
    sys.stdout, sys.stderr = _text(1), _text(2)


class _Log(io.FileIO):
    """A log that loses what its disk has no room for, rather than fail whoever prints."""

    def write(self, data: Any) -> int:
        """Write what can be written; claim the rest."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _text(fd: int) -> TextIO:
    log = io.BufferedWriter(_Log(fd, "w", closefd=False))
    return io.TextIOWrapper(log, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _set_oom_score(adjustment: int) -> None:
    if adjustment == 0:
        return
    try:
        Path("/proc/self/oom_score_adj").write_text(str(adjustment))
    except OSError as error:  # only root may lower it
        print(f"oom_score_adj {adjustment} is refused: {error}", file=sys.stderr)  # noqa: T201 - its log


def _set_environment(config: NodeConfig, spawn: Spawn, agent: int) -> None:
    os.environ.update(spawn.env)
    os.environ[strays.AGENT_VARIABLE] = str(agent)
    os.environ[strays.VARIABLE] = strays.mark_of(config.run_id, spawn.name, spawn.incarnation)
