"""Does what modules do while they are imported."""

import os
import threading

import torch
from triton.runtime import driver

TOY = os.environ.get("TOY", "")
KEPT = torch.cuda.current_device

if "thread" in TOY:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if "touch" in TOY:
    torch.cuda._lazy_init()
if "past torch" in TOY:
    torch.cuda._initialized = True
GPU = None
if torch.cuda.is_available():
    GPU = {
        "capability": torch.cuda.get_device_capability(),
        "name": torch.cuda.get_device_name("cuda:1"),
        "memory": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        "triton": driver.active.utils.get_device_properties(1)["max_shared_mem"],
    }
