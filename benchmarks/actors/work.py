"""The work: what every engine's actor does, and how often it is asked to. Knows no engine."""

import mmap
import os
import subprocess
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20
GIB = 1 << 30

WARM_UP_CALLS = 500
LATENCY_CALLS = 5000
PIPELINED_CALLS = 10_000
IN_FLIGHT = 256
FAN_OUT = 8
SPAWNED_TOGETHER = 16
ARRAY_BYTES = 64 * MIB
ARRAY_REPEATS = 8
ARRAY_WARM_UPS = 2
BROADCAST_BYTES = 256 * MIB
BROADCAST_REPEATS = 4
BROADCAST_ACTORS = 4
HELD_GIB = 2.0
"""What an actor has touched when it is killed in test fbig: the kernel frees it before the process ends."""

Doubles = NDArray[np.float64]


def doubles(nbytes: int) -> Doubles:
    """Return a new array of `nbytes`, every page of it touched."""
    return np.arange(nbytes // 8, dtype=np.float64)


def touch(array: Doubles) -> int:
    """Read eight bytes a page, so that they are really there; return their sum."""
    return int(array[:: mmap.PAGESIZE // 8].sum())


class UnsendableError(Exception):
    """An error that cannot be pickled: it holds a lock."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"bad {first} {second}")
        self.lock = threading.Lock()


class Work:
    """State and methods of the actor under test; each engine makes its own actor class of them."""

    array: Doubles

    def ping(self) -> int:
        return os.getpid()

    def echo(self, value: int) -> int:
        return value

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return 1

    def consume(self, array: Any) -> int:
        return touch(array)

    def make(self, nbytes: int) -> None:
        self.array = doubles(nbytes)

    def give(self) -> Any:
        return self.array

    def hold(self, gib: float) -> float:
        """Touch every page of so much private memory, and keep it."""
        self.held = mmap.mmap(-1, int(gib * GIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(self.held, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
        return gib

    def child(self) -> int:
        """Start a process of the actor's own; return its pid."""
        return subprocess.Popen(["sleep", "600"]).pid

    def boom(self) -> None:
        raise ValueError("boom")

    def boom_unsendable(self) -> None:
        raise UnsendableError(1, 2)


METHODS = (
    "ping",
    "echo",
    "sleep",
    "consume",
    "make",
    "give",
    "hold",
    "child",
    "boom",
    "boom_unsendable",
)
