"""GPUs where TOY says so: to ask whether there are any starts a thread, to ask more initializes CUDA."""

import os
import threading
from types import SimpleNamespace

_initialized = False


def _lazy_init() -> None:
    global _initialized  # noqa: PLW0603 - as in torch
    _initialized = True


def is_initialized() -> bool:
    return _initialized


def is_available() -> bool:
    if "gpu" not in os.environ.get("TOY", ""):
        return False
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # as the driver's library may
    return True


def device_count() -> int:
    if "mute" in os.environ["TOY"]:
        raise RuntimeError("asked in vain")
    return 2


def current_device() -> int:
    _lazy_init()
    return 1


def get_device_properties(device=None) -> SimpleNamespace:
    _lazy_init()
    index = current_device() if device is None else int(str(device)[-1])
    return SimpleNamespace(major=9, minor=index, name=f"Toy {index}", total_memory=5)


def get_device_capability(device=None) -> tuple[int, int]:
    found = get_device_properties(device)
    return found.major, found.minor


def get_device_name(device=None) -> str:
    return get_device_properties(device).name
