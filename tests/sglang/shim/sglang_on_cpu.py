"""Runs at the start of every interpreter of `.venv-sglang`: SGLang is to look for no GPU.

The missing packages beside this file stand in for what a CPU does not need.
"""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
