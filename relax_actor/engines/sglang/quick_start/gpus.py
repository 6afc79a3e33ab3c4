"""Imports modules that ask about GPUs without touching CUDA: another process asks, they get its answers."""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

from .lives import die_with

CUDA_ERROR_NOT_INITIALIZED = 3
OURS = str(Path(__file__).parent)


def import_all(names: Iterable[str]) -> str:
    """Import modules; return who touched CUDA meanwhile, in words, or nothing."""
    gc.disable()  # it frees nothing of modules, and looks at all of them again and again
    try:
        with gpu_answers() as touched:
            for name in names:
                importlib.import_module(name)
    finally:
        gc.freeze()  # what is forked then shares these pages for longer
        gc.enable()
    return "".join(touched[:1])


@contextlib.contextmanager
def gpu_answers() -> Iterator[list[str]]:
    """Have questions about GPUs answered out of another process; yields who touched CUDA nevertheless."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU, without CUDA
    cuda = importlib.import_module("torch").cuda
    touched: list[str] = []
    initialize = "_lazy_init"  # what torch calls before it uses CUDA
    answers, real = Answers(cuda), getattr(cuda, initialize)

    def tell_tale() -> None:
        if not cuda.is_initialized():
            touched.append(f"CUDA was initialized by {_caller()}")
        real()

    setattr(cuda, initialize, tell_tale)
    try:
        yield touched
    finally:
        setattr(cuda, initialize, real)
        answers.close()


class Answers:
    """What torch and Triton say of GPUs, asked for in a process of its own.

    Not even whether there is one is asked here: the driver's management library may start a thread for it.
    """

    def __init__(self, cuda: Any) -> None:
        self._open = True
        read, write = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _tell(cuda, write, parent)
        os.close(write)
        self._lines = os.fdopen(read, "rb")
        self._known: dict[str, Any] = {}
        for name, answer in self._answered.items():
            setattr(cuda, name, self._while_open(getattr(cuda, name), answer))
        triton = _triton_utils()  # it keeps functions of torch's, and must get ours
        if triton is not None:
            triton.get_device_properties = self._while_open(triton.get_device_properties, Answers._of_triton)

    def close(self) -> None:
        """Let torch and Triton answer again, also those functions of ours that somebody has kept."""
        self._open = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._lines.close()

    def _while_open(self, real: Any, answer: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def function(*words: Any, **named: Any) -> Any:
            if self._open:
                with contextlib.suppress(LookupError, ValueError):  # nothing was told: then it is CUDA's turn
                    return answer(self, *words, **named)
            return real(*words, **named)

        return function

    def _told(self, what: str) -> Any:
        while what not in self._known:
            self._known |= json.loads(self._lines.readline())  # an end of the lines is a ValueError
        return self._known[what]

    def _of(self, device: Any = None) -> SimpleNamespace:
        index = device if isinstance(device, str) else getattr(device, "index", device)
        if isinstance(index, str):
            index = int(index.rpartition(":")[2]) if ":" in index else 0
        return SimpleNamespace(**self._told("torch")[index or 0])

    def _of_triton(self, index: int) -> dict[str, Any]:
        return dict(self._told("triton")[index])

    def _capability(self, device: Any = None) -> tuple[int, int]:
        return self._of(device).major, self._of(device).minor

    def _name(self, device: Any = None) -> str:
        return str(self._of(device).name)

    def _count(self) -> int:
        return int(self._told("count"))

    def _is_available(self) -> bool:
        return self._count() > 0

    def _current(self) -> int:
        if not self._is_available():
            raise LookupError
        return 0

    _answered: ClassVar[dict[str, Callable[..., Any]]] = {
        "is_available": _is_available,
        "device_count": _count,
        "current_device": _current,
        "get_device_capability": _capability,
        "get_device_name": _name,
        "get_device_properties": _of,
    }


def _triton_utils() -> Any:
    """Return that object of Triton's that knows GPUs, if there is one."""
    with contextlib.suppress(Exception):
        return importlib.import_module("triton.runtime").driver.active.utils
    return None


def _tell(cuda: Any, write: int, parent: int) -> NoReturn:
    """Write what is known of all GPUs, how many there are first, and end."""
    try:
        die_with(parent)
        devices = range(cuda.device_count() if cuda.is_available() else 0)
        _write(write, {"count": len(devices)})
        each = [cuda.get_device_properties(index) for index in devices]
        _write(
            write,
            {"torch": [{name: getattr(one, name) for name in dir(one) if name[0] != "_"} for one in each]},
        )
        triton = _triton_utils()
        if triton is not None:
            _write(write, {"triton": [triton.get_device_properties(index) for index in devices]})
    finally:
        os._exit(0)


def _write(write: int, told: dict[str, Any]) -> None:
    os.write(write, json.dumps(told, default=str).encode() + b"\n")


def _caller() -> str:
    """Return the innermost place that is not of torch or of this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and f"{os.sep}torch{os.sep}" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return "somebody unknown"


def driver_is_up() -> bool:
    """Return whether anybody has called cuInit here, past torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)
