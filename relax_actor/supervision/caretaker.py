"""Clears away what a killed head leaves on its host, where no node agent is that would.

A keeper on the head's host sweeps for it. Where all hosts of a tree are others (through ssh, or as Slurm's
job steps), a shell waits for the head's end instead: it reads from a pipe that the head never writes to, and
the kernel closes that. It is in a session of its own, so that neither Ctrl-C nor a signal to the head's
process group takes it along, holds nothing else of the head open, and costs a few hundred kilobytes.
"""

import os
import subprocess
from pathlib import Path

from transport.shm import ShmSpace

_WAIT = 'trap \'\' INT TERM HUP; read -r _; rm -rf -- "$1" "$2"*'
_LABEL = "x"


class Caretaker:
    """Removes a head's socket folder and segments when the head is gone, however it ended.

    Args:
        folder: for sockets; nobody else uses it.
        space: of the run's segments.
        epoch: which incarnation of the head this is.
    """

    def __init__(self, folder: Path, space: ShmSpace, epoch: int) -> None:
        segments = space.root / space.name("head", epoch, _LABEL).removesuffix(_LABEL)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, "relax-actor-caretaker", str(folder), str(segments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )

    def close(self) -> None:
        """Have it clear away now, and wait until it has."""
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe above
        self._process.stdin.close()
        self._process.wait()
