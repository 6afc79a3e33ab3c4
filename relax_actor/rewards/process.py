"""The pool's end of a worker process: start it, ask it with a deadline, kill it with all it started."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import psutil

from relax_actor.errors import RelaxError
from relax_actor.rewards.registry import RewardFunctionError, RewardInput
from relax_actor.rewards.worker import Answer

_START_TIMEOUT_S = 120.0  # a user's module may import torch, on a busy machine
_REAP_S = 10.0
# The worker gets our module path as it is; with -P it adds neither its folder nor its script's.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from relax_actor.rewards.worker import main; main()"
)


class WorkerLostError(RelaxError):
    """A worker process ended; `exit` says how, such as `SIGKILL` or `exit code 3`."""

    def __init__(self, exit_text: str) -> None:
        self.exit = exit_text
        super().__init__(f"the reward worker ended: {exit_text}")


class WorkerTimeoutError(RelaxError):
    """A worker process did not answer within `timeout_s` and was killed."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(f"the reward worker did not answer within {timeout_s:g} s")


class WorkerProcess:
    """One worker, started again whenever needed. Used by one thread, but for `retire` and the properties.

    Args:
        function: what the worker resolves.
        user_path: folder of the user's modules, or nothing.
    """

    def __init__(self, function: str, user_path: str) -> None:
        self._function, self._user_path = function, user_path
        self._lock = threading.Lock()  # a retired worker never starts
        self._retired = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket()

    @property
    def pid(self) -> int | None:
        """The process that is alive now, if any."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def ensure_started(self) -> None:
        """Start a process unless one is alive; return when it can take tasks.

        The kernel kills the process when the calling thread ends.

        Raises:
            RewardFunctionError: the function cannot be used.
            WorkerLostError: it ended while starting, or this worker is retired.
            WorkerTimeoutError: it was not ready in time.
        """
        if self.pid is not None:
            return
        self.kill()
        self._spawn()
        answer = self._receive(_START_TIMEOUT_S)
        if answer.problem:
            self.kill()
            raise RewardFunctionError("reward.function", answer.problem, answer.hint)

    def ask(self, task: RewardInput, timeout_s: float) -> Answer:
        """Have a sample scored.

        Raises:
            WorkerLostError: the process ended before it answered.
            WorkerTimeoutError: it took too long; it is dead now.
            TypeError: `task.extra` is not JSON.
        """
        line = json.dumps(msgspec.structs.asdict(task)).encode() + b"\n"
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(line)
        except TimeoutError:
            self.kill()
            raise WorkerTimeoutError(timeout_s) from None
        except OSError:
            raise WorkerLostError(self._exit_text()) from None
        return self._receive(timeout_s)

    def kill(self) -> None:
        """Kill the process and everything it started; returns when it is reaped."""
        self._socket.close()
        self._kill_tree()

    def retire(self) -> None:
        """Kill the process for good, from any thread; whoever waits for its answer loses it."""
        with self._lock:
            self._retired = True
        self._kill_tree()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path)]
        command += [self._function, self._user_path, str(os.getpid())]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with theirs, self._lock:
            if self._retired:
                ours.close()
                raise WorkerLostError("retired")
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        self._socket = ours

    def _receive(self, timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        received = bytearray()
        while not received.endswith(b"\n"):
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                chunk = self._socket.recv(1 << 16)
            except TimeoutError:
                self.kill()
                raise WorkerTimeoutError(timeout_s) from None
            except OSError:
                chunk = b""
            if not chunk:
                raise WorkerLostError(self._exit_text())
            received += chunk
        return Answer(**json.loads(received))  # not msgspec: it refuses lone surrogates

    def _exit_text(self) -> str:
        """Reap a process that closed its socket; one that only closed it is killed."""
        process = self._process
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(1.0) if process else None
        self.kill()
        if code is None:
            return "it closed its socket"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _kill_tree(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
