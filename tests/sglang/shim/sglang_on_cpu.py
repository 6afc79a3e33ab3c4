"""Runs at the start of every interpreter of `.venv-sglang`: what makes SGLang quick to start on a CPU.

Beyond the missing packages beside this file it changes three things. The server's processes are forked and
not spawned, so that they share one import of SGLang, which takes 7 s of CPU; it forks before it serves, and
there is no CUDA. `SGLANG_ON_CPU_SPAWN=1` leaves that out. Of the model classes only those that are tested
are imported. And the collector runs seldom while modules are made, of which it frees nothing (1.5 s).
"""

import gc
import multiprocessing
import os

gc.set_threshold(50_000, 50, 100)
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang_small_models")
_set_start_method = multiprocessing.set_start_method


def set_start_method(method, force=False):
    """Fork where a process would be spawned."""
    _set_start_method("fork" if method == "spawn" else method, force=force)


if os.environ.get("SGLANG_ON_CPU_SPAWN") != "1":
    multiprocessing.set_start_method = set_start_method  # torch.multiprocessing takes it from there
