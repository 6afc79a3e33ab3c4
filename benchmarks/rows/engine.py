"""What an engine of this benchmark is: it starts, and gives producers and a consumer their ends."""

import abc
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from rows import work
from rows.work import Plan, Row


class Producer(abc.ABC):
    """One producer's end."""

    parts: work.Parts = {}  # noqa: RUF012 - nothing is written into this one

    @abc.abstractmethod
    def put(self, rows: list[Row], first: int) -> None:
        """Put rows; where the engine acknowledges, return after that."""

    def close(self) -> None:  # noqa: B027 - not every engine has something to do
        """Let go."""


class Consumer(abc.ABC):
    """The consumer's end."""

    parts: work.Parts = {}  # noqa: RUF012 - nothing is written into this one

    @abc.abstractmethod
    def get(self) -> tuple[Row, float | None]:
        """Return a packed micro-batch and the seconds it took; None where it was waited for."""

    def after(self) -> None:  # noqa: B027 - not every engine has something to do
        """The micro-batch is used: acknowledge it, where there is such a thing."""

    def close(self) -> None:  # noqa: B027 - not every engine has something to do
        """Let go."""


class Engine(abc.ABC):
    """A peer whose producers and consumer are plain processes."""

    version = ""

    def start(self, plan: Plan) -> Any:  # noqa: B027 - not every engine has something to do
        """Start what is shared; return what the processes need of it."""

    def stop(self) -> None:  # noqa: B027 - not every engine has something to do
        """End what `start` made."""

    @abc.abstractmethod
    def producer(self, shared: Any, plan: Plan, index: int) -> Producer:
        """Make a producer's end, in its own process."""

    @abc.abstractmethod
    def consumer(self, shared: Any, plan: Plan) -> Consumer:
        """Make the consumer's end, in its own process."""

    def launch(self, plan: Plan, shared: Any) -> Callable[[], bool]:
        """Start the processes; return a function that says whether all are as they should be."""
        context = multiprocessing.get_context("spawn")
        tasks = [(consume, ())] + [(produce, (index,)) for index in range(plan.producers)]
        self.processes = [
            context.Process(target=task, args=(self, shared, plan, *more), daemon=True)
            for task, more in tasks
        ]
        for process in self.processes:
            process.start()
        return lambda: all(process.exitcode in (None, 0) for process in self.processes)

    def join(self) -> None:
        """Wait for the processes of `launch`."""
        for process in self.processes:
            process.join(10)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # what runs in this process stays in it


def produce(engine: Engine, shared: Any, plan: Plan, index: int) -> None:
    """Be a producer."""
    end = engine.producer(shared, plan, index)
    work.produce(plan, index, end.put, end.parts)
    await_done(plan)
    end.close()


def consume(engine: Engine, shared: Any, plan: Plan) -> None:
    """Be the consumer."""
    end = engine.consumer(shared, plan)
    work.consume(plan, end.get, end.after, end.parts)
    end.close()


def await_done(plan: Plan) -> None:
    """Return when the consumer has everything."""
    board = work.Board(plan)
    while not board.is_done:
        time.sleep(0.01)
