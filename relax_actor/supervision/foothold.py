"""What a head has on its own host, and what clears that away however the head ends.

A keeper on the head's host sweeps for a killed head. Where all hosts of a tree are others (through ssh, or as
Slurm's job steps), a shell waits for the head's end instead: it reads from a pipe that the head never writes
to, and the kernel closes that. It is in a session of its own, so that neither Ctrl-C nor a signal to the
head's process group takes it along, holds nothing else of the head open, and costs a few hundred kilobytes.
"""

import os
import shutil
import subprocess

from relax_actor.node import remains
from transport.shm import ShmSpace

_WAIT = 'trap \'\' INT TERM HUP; read -r _; rm -rf -- "$1" "$2"*'
_LABEL = "x"


class Foothold:
    """A head's socket folder, the claim on it, and its segments.

    Args:
        run_id: of the run.
        shm_root: where its segments are.

    Attributes:
        folder: for sockets.
        space: of the segments.
    """

    def __init__(self, run_id: str, shm_root: str) -> None:
        self.folder, self._claim = remains.claim(run_id, run_id, shm_root)
        self.space = ShmSpace(run_id, shm_root)
        self._caretaker: subprocess.Popen[bytes] | None = None

    def keep_clear(self, epoch: int) -> None:
        """Have a caretaker wait for the head's end: for trees that have nobody else on this host.

        Args:
            epoch: which incarnation of the head this is.
        """
        segments = self.space.root / self.space.name("head", epoch, _LABEL).removesuffix(_LABEL)
        self._caretaker = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, "relax-actor-caretaker", str(self.folder), str(segments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )

    def leave(self) -> None:
        """Clear everything away; wait until the caretaker is gone, too."""
        self.space.sweep()  # where no agent is on this host, nobody else does
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._caretaker is not None:
            self._caretaker.communicate()  # closes the pipe
        os.close(self._claim)
