"""Actors for the tests of calls: slow, busy, waiting for one another, and failing in every way."""

import asyncio
import time

import msgspec
import numpy as np
import sample_actors

from relax_actor import Actor, endpoint, gather


class UnsendableError(Exception):
    """Cannot be pickled and is known to no caller."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"bad {first} {second}")
        self.lock = open("/dev/null")  # noqa: PTH123, SIM115 - anything that cannot travel


class Worker(Actor):
    """Does what it is told, slowly where it is told so."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.kept: object = None
        self.noticed: list[str] = []

    @endpoint
    def echo(self, value: object) -> object:
        return value

    @endpoint
    def note(self, number: int) -> None:
        self.order.append(number)

    @endpoint(idempotent=True)
    def note_again(self, number: int) -> list[int]:
        self.order.append(number)
        return self.order

    @endpoint
    def notes(self) -> list[int]:
        return self.order

    @endpoint
    def wait_for(self, path: str) -> None:
        sample_actors.wait_for(path)

    @endpoint
    def work_until_cancelled(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.ctx.cancelled() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.noticed.append("cancelled" if self.ctx.cancelled() else "late")

    @endpoint
    async def wait_until_cancelled(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.noticed.append("task cancelled")
            raise

    @endpoint
    def what_was_noticed(self) -> list[str]:
        return self.noticed

    @endpoint
    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    @endpoint
    def scale(self, array: np.ndarray) -> np.ndarray:
        array *= 2  # what came for this actor alone is its own
        return array

    @endpoint
    def keep(self, array: np.ndarray) -> None:
        self.kept = array

    @endpoint
    def drop(self) -> float:
        kept, self.kept = self.kept, None
        return float(kept[0])

    @endpoint
    def ones(self, mebibytes: int) -> np.ndarray:
        return np.ones(mebibytes << 17)

    @endpoint
    def ask_sync(self, path: list[str]) -> int:
        """Ask the first of the path with the rest of it, and block until it answers."""
        if not path:
            return 0
        return self.ctx.ref(path[0], Worker).within(20).ask(Worker.ask_sync, path[1:]).result() + 1

    @endpoint(concurrency=4)
    async def ask_async(self, path: list[str]) -> int:
        if not path:
            return 0
        return await self.ctx.ref(path[0], Worker).within(20).ask(Worker.ask_async, path[1:]) + 1

    @endpoint
    def fail_if(self, replicas: list[int], text: str) -> int:
        if self.ctx.replica in replicas:
            raise ValueError(text)
        return self.ctx.replica

    @endpoint
    def replica_in_turn(self, folder: str) -> int:
        """Return who this is, once the folder has a file of that name."""
        sample_actors.wait_for(f"{folder}/{self.ctx.replica}")
        return self.ctx.replica

    @endpoint
    def gather_from(self, names: list[str]) -> list[int]:
        refs = [self.ctx.ref(name, Worker) for name in names]
        return gather(refs, Worker.fail_if, [], "").result()

    @endpoint
    def fail_hugely(self) -> None:
        raise ValueError("x" * 100_000_000 + "the end")

    @endpoint
    def fail_recursively(self) -> None:
        error = ValueError("round")
        cause = KeyError("and round")
        cause.__cause__ = error
        raise error from cause

    @endpoint
    def fail_deeply(self) -> None:
        error: Exception = ValueError("first")
        for _ in range(20_000):
            error, error.__cause__ = RuntimeError("next"), error
        raise error

    @endpoint
    def fail_as_if_refused(self) -> None:
        raise msgspec.ValidationError("mine")

    @endpoint
    def fail_unsendably(self) -> None:
        raise UnsendableError(1, 2)

    @endpoint
    def fail_without_module(self) -> None:
        raise type("FleetingError", (Exception,), {"__module__": "nowhere"})("gone")

    @endpoint
    def return_unsendable(self) -> object:
        return object()
