"""As much of torch as a quick start needs."""

from types import SimpleNamespace

from . import cuda
from .cuda import accelerator

_C = SimpleNamespace(_get_accelerator=accelerator)


def device(kind: str) -> str:
    return kind


def get_device_module():
    return {"cuda": cuda, "cpu": None}[_C._get_accelerator()]
