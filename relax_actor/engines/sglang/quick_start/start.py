"""Becomes SGLang's server."""

import runpy
import sys
import time
from collections.abc import Sequence

from .gpus import import_all
from .models import skip_models
from .twin import fork_twin, why_not

SERVER = "sglang.launch_server"
IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
"""What main process, schedulers and detokenizer import."""


def main(words: Sequence[str]) -> None:
    """Become SGLang's server with these arguments."""
    began = time.monotonic()
    models = skip_models(words)
    culprit = import_all(IMPORTED)
    obstacle = culprit or why_not()
    if obstacle:
        say(f"imported in {time.monotonic() - began:.1f} s; processes are spawned: {obstacle}")
    else:
        twin = fork_twin()
        say(f"imported in {time.monotonic() - began:.1f} s, {models}; process {twin} forks the others")
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def say(what: str) -> None:
    """Write a line as SGLang's log has them."""
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] quick start: {what}\n")
    sys.stderr.flush()
