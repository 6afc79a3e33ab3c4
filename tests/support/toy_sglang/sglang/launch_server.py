"""Starts a process as SGLang does, and says how it came out."""

import json
import multiprocessing as mp
import os
import signal
import sys

from sglang.srt.entrypoints import http_server
from sglang.srt.managers import scheduler
from sglang.srt.models import registry


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # a signal's handler may say something while something is said


if __name__ == "__main__":
    import torch

    touched = torch.cuda.is_initialized()
    signal.signal(signal.SIGQUIT, lambda *_: say("quit"))
    mp.set_start_method("spawn", force=True)
    os.environ["TOLD_LATE"] = "yes"
    del os.environ["TOLD_EARLY"]
    reader, writer = mp.Pipe(duplex=False)
    process = mp.Process(target=scheduler.run, args=(writer,))
    if "preload" in http_server.TOY:
        os.environ["LD_PRELOAD"] = ""
    process.start()
    result = {
        "main": os.getpid(),
        "child": reader.recv(),
        "method": mp.get_start_method(),
        "arguments": sys.argv[1:],
        "skipped": registry.SKIPPED,
        "gpu": http_server.GPU,
        "touched": touched,
        "kept": http_server.KEPT(),
    }
    say(json.dumps(result))
    process.join()
    say(f"ended {process.exitcode}")
