"""Actors the tests start; importable both in the test process and in the actor processes."""

import os
import signal
import subprocess
import sys
import time

import numpy as np

from relax_actor import Actor, endpoint


class Counter(Actor):
    """Counts, fails, sleeps and dies on request."""

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.gone: list[str] = []

    @endpoint
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @endpoint(idempotent=True)
    def where(self) -> tuple[int, int]:
        return os.getpid(), self.ctx.incarnation

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def run_out_of_memory(self, text: str) -> None:
        raise MemoryError(text)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def wait_for(self, path: str) -> None:
        wait_for(path)

    @endpoint
    def die(self, signal_number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), signal_number)
        time.sleep(60)

    @endpoint
    def double(self, array: np.ndarray) -> np.ndarray:
        return array * 2

    @endpoint
    def spawn_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    @endpoint
    def peers_gone(self) -> list[str]:
        return self.gone

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:
        self.gone.append(f"{name}#{incarnation} {reason}")


class Relay(Actor):
    """Calls another actor."""

    @endpoint
    async def add_via(self, name: str, amount: int) -> int:
        return await self.ctx.ref(name, Counter).ask(Counter.add, amount)


class Busy(Actor):
    """Keeps its thread, and the GIL, for as long as it is told to."""

    @endpoint
    def spin(self, seconds: float) -> None:
        print("spinning")  # noqa: T201 - into its log
        os.nice(10)  # this thread: it need not keep the cores from other tests
        spin_here(seconds)


def wait_for(path: str) -> None:
    """Be busy until there is such a file."""
    while not os.path.exists(path):  # noqa: PTH110 - all day long
        time.sleep(0.005)


def spin_here(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
