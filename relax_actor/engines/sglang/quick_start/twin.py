"""A process forked from this one while it is clean, of which what SGLang spawns is forked."""

import contextlib
import importlib
import inspect
import multiprocessing.context
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver, popen_forkserver, spawn
from pathlib import Path
from typing import Any, NoReturn

from .gpus import driver_is_up
from .lives import die_with

TITLE = "sglang::twin"
"""Whatever is called so is watched by the engine."""

FORK_SERVER = ["listener_fd", "alive_r", "preload", "main_path", "sys_path"]
"""Its arguments in Python 3.10 to 3.13; 3.14 wants a key of its clients."""


def why_not() -> str:
    """Return why a twin of this process would not be like new, or nothing."""
    if importlib.import_module("torch").cuda.is_initialized() or driver_is_up():
        return "CUDA was initialized while modules were imported"
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        return f"there are other threads: {', '.join(threads)}"
    if list(inspect.signature(forkserver.main).parameters) != FORK_SERVER:
        return f"the fork server of Python {sys.version.split()[0]} is an unknown one"
    return ""


def fork_twin() -> int:
    """Fork the twin, and have what is spawned from now on forked from it; return its pid."""
    parent = os.getpid()
    alive_r, alive_w = os.pipe()
    listener, address = _private_listener()
    pid = os.fork()
    if not pid:
        os.close(alive_w)
        _serve(listener.detach(), alive_r, parent)
    os.close(alive_r)
    listener.close()
    known = {"_forkserver_address": address, "_forkserver_alive_fd": alive_w, "_forkserver_pid": pid}
    vars(vars(forkserver)["_forkserver"]).update(known)  # as if `multiprocessing` had started it
    _mean_forking()
    return pid


def _private_listener() -> tuple[socket.socket, str]:
    """Return a socket that listens, and an address of it that is good in this process only.

    What comes in there is run, so nobody else may find it; and no file is left behind by a death.
    """
    listener = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory(prefix="twin-") as folder:
        path = f"{folder}/socket"
        listener.bind(path)
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    listener.listen()
    return listener, f"/proc/self/fd/{file}"


def _mean_forking() -> None:
    """Have the start method `spawn` fork from the twin, but for what only a new interpreter can have."""
    process, start = multiprocessing.context.SpawnProcess, "_Popen"
    plain, owner = getattr(process, start), os.getpid()
    executable, preload = spawn.get_executable(), os.environ.get("LD_PRELOAD")

    def popen(process_obj: Any) -> Any:
        new = spawn.get_executable() != executable or os.environ.get("LD_PRELOAD") != preload
        if new or os.getpid() != owner:
            return plain(process_obj)
        return _with_environment(popen_forkserver.Popen, process_obj)

    setattr(process, start, staticmethod(popen))


def _with_environment(popen: Any, process_obj: Any) -> Any:
    """Start a process that gets this one's environment, which a fork server alone does not do."""
    real = spawn.get_preparation_data

    def data(name: str) -> dict[str, Any]:
        return {**real(name), "environ": dict(os.environ)}

    spawn.get_preparation_data = data
    try:
        return popen(process_obj)
    finally:
        spawn.get_preparation_data = real


def _serve(listener: int, alive_r: int, parent: int) -> NoReturn:
    """Be the twin: fork what is asked for until the main process ends, and die with it."""
    try:
        die_with(parent)
        # SGLang's processes report a failure to their parent; that is this one, and meant is its parent.
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(parent, signal.SIGQUIT))
        importlib.import_module("setproctitle").setproctitle(TITLE)
        real, twin = spawn.prepare, os.getpid()

        def prepare(data: Mapping[str, Any]) -> None:
            die_with(twin)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            _replace_environment(data["environ"])
            real(dict(data))

        spawn.prepare = prepare
        with contextlib.suppress(SystemExit):  # the main process has ended
            forkserver.main(listener, alive_r, [])
    except BaseException:  # noqa: BLE001 - nothing of this process may run on as the main process
        traceback.print_exc()
    finally:
        os._exit(0)


def _replace_environment(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
