"""What a zygote imports before it forks actors, and whether it may fork after that.

A fork copies one thread, and a driver's context does not survive it. So a process that has more than one
thread, or has touched a device, forks nobody: an import that does either is found out here, and named.
"""

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TORCH_WARM_POOL": "0",  # of processes that compile, with a thread that reads from them
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow, which transformers imports where it is
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is asked without touching one
}
"""In force while a zygote imports; actors get the user's own values back."""

SAVED = "RELAX_ACTOR_SAVED_"
"""Prefix of the variables in which the user's own values are kept meanwhile."""


UNCOLLECTED = 1 << 30
"""Objects that may be made before the next look for garbage, while importing."""

SETTLE_S = 0.5
"""How long a thread may take to end after the last import."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """How the imports went.

    Args:
        error: which module could not be imported, and why; or nothing.
        unfit: why the process must not fork, though everything is imported; or nothing.
    """

    error: str = ""
    unfit: str = ""


def environment() -> dict[str, str]:
    """Return what is to be set while importing, and the user's own values beside."""
    own = {SAVED + name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return ENVIRONMENT | own


def restore_environment() -> None:
    """Give this process the user's own values back."""
    for name in ENVIRONMENT:
        saved = os.environ.pop(SAVED + name, None)
        os.environ.pop(name, None)
        if saved is not None:
            os.environ[name] = saved


def load(modules: Sequence[str]) -> Imported:
    """Import modules one after another, and look after each whether the process may still fork."""
    culprit = ""
    for module in ("relax_actor", *modules):
        try:
            with _few_collections():
                importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - an import may raise anything; the agent reports it
            return Imported(error=f"the zygote could not import {module}: {type(error).__name__}: {error}")
        culprit = culprit or (module if _trouble() else "")
    trouble = _lasting_trouble() if culprit else ""
    return Imported(unfit=trouble and f"importing {culprit} {trouble}")


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for no garbage meanwhile: what is imported is none, and looking takes a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(UNCOLLECTED)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == UNCOLLECTED:  # or the module has set its own
            gc.set_threshold(*before)


def _lasting_trouble() -> str:
    """Return why this process must not fork, though it was given time: a thread ends after it is joined."""
    until_s = time.monotonic() + SETTLE_S
    while (trouble := _trouble()) and time.monotonic() < until_s:
        time.sleep(0.005)
    return trouble


def _trouble() -> str:
    """Return why this process must not fork, or nothing."""
    if threads := _other_threads():
        return f"started threads, which a fork would lose: {', '.join(threads)}"
    if touched := _device_in_use():
        return f"touched a device, which does not survive a fork: {touched}"
    return ""


def _other_threads() -> list[str]:
    """Return the sorted names of the threads beside the first: Python's, or else the kernel's."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    others = [int(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]  # noqa: PTH208 - quick
    return sorted(known.get(task) or _kernel_name(task) for task in others)


def _kernel_name(task: int) -> str:
    with suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:  # noqa: PTH123 - as above
        return file.read().strip()
    return "one that has ended"


def _device_in_use() -> str:
    """Return how this process has come to use a GPU, or nothing if it has not.

    NVML opens other files of the driver's, and survives a fork; CUDA always opens this one.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch.cuda is initialized"
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the listing's own descriptor is gone by then
        with suppress(OSError):
            if (path := os.readlink(f"/proc/self/fd/{fd}")).startswith("/dev/nvidia-uvm"):  # noqa: PTH115 - as above
                return f"{path} is open"
    return ""
