"""Needs CUDA to be there, but does not initialize it."""

from types import SimpleNamespace

import torch


def _properties(index: int) -> dict[str, int]:
    return {"max_shared_mem": 100 + index if torch.cuda.is_initialized() else -1}


driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace(get_device_properties=_properties)))
