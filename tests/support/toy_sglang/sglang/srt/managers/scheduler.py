"""Says how it was started, and waits to be killed."""

import os
import signal

IMPORTED_IN = os.getpid()


def run(writer) -> None:
    writer.send({"pid": os.getpid(), "parent": os.getppid(), "imported_in": IMPORTED_IN, **os.environ})
    signal.pause()
