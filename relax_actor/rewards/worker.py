"""The process a reward function runs in: one task in, one answer out, until the socket closes.

The socket to the pool is standard input when the process starts; it is moved away at once, so that
whatever the function prints goes to the log and whatever it reads is empty. Task and answer are a line
of ASCII JSON each: lone surrogates and newlines pass, and nothing is unpickled.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import msgspec

from relax_actor.errors import RelaxError
from relax_actor.rewards.registry import RewardFunction, RewardFunctionError, RewardInput, resolve
from relax_actor.rewards.value import as_reward

_PR_SET_PDEATHSIG = 1
_TRACEBACK_CHARACTERS = 4000


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says: that it is ready, that it cannot be, or how a task went."""

    reward: float | None = None
    problem: str = ""  # what the function did instead of returning a reward
    kind: str = ""  # type and place of an exception: problems of one kind are one bug
    traceback: str = ""
    seconds: float = 0.0
    hint: str = ""  # where the function cannot be used at all


def serve(function_name: str, user_path: str, parent_pid: int) -> None:
    """Score tasks until the pool closes its end of the socket.

    Args:
        function_name: what `registry.resolve` understands.
        user_path: folder of the user's modules, or nothing.
        parent_pid: the pool's process; this one dies with it.
    """
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    connection = _take_stdin()
    with connection, connection.makefile("rb") as lines:
        try:
            function = resolve(function_name, user_path)
        except RewardFunctionError as error:
            _send(connection, Answer(problem=error.fact, hint=error.hint))
            return
        _send(connection, Answer())
        for line in lines:
            _send(connection, _score(function, RewardInput(**json.loads(line))))


def _die_with(parent_pid: int) -> None:
    """Ask the kernel for a SIGKILL when the thread that started this process is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def _take_stdin() -> socket.socket:
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a file descriptor, not a path, is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return connection


def _score(function: RewardFunction, task: RewardInput) -> Answer:
    started = time.monotonic()
    try:
        answer = Answer(reward=as_reward(function(task)))
    except RelaxError as error:
        answer = Answer(problem=str(error), kind=str(error))
    except BaseException as error:  # noqa: BLE001 - also SystemExit: a reward function does not end a run
        answer = _failed(error)
    return msgspec.structs.replace(answer, seconds=time.monotonic() - started)


def _failed(error: BaseException) -> Answer:
    """Describe an exception; the frame where it was raised makes its kind."""
    name = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return Answer(
        problem=f"raised {name}: {_text_of(error)}",
        kind=f"{name} at {frames[-1].filename}:{frames[-1].lineno}",
        traceback="".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:],
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:  # noqa: BLE001 - an exception whose text raises
        return "(its text cannot be made)"


def _send(connection: socket.socket, answer: Answer) -> None:
    connection.sendall(json.dumps(msgspec.to_builtins(answer)).encode() + b"\n")


def main() -> None:
    """Run as the pool starts it: function name, user path, parent's pid."""
    arguments: list[Any] = sys.argv[-3:]
    serve(arguments[0], arguments[1], int(arguments[2]))
