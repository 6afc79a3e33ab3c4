"""An engine of which all ends are actors: a supervisor with a queue, the producers and the consumer.

`loop` and `row_queue` are such engines. They say which queue actor there is and what its ends do.
"""

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from relax_actor import (
    Actor,
    ChildSpec,
    Intensity,
    RestartType,
    Supervisor,
    SupervisorSpec,
    __version__,
    endpoint,
)
from rows.engine import Consumer, Engine, Producer
from rows.work import Plan

RUN_S = 300.0  # no end of a benchmark may take longer


class End(Actor):
    """A process of the benchmark: it follows the plan when told to."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @endpoint(timeout_s=RUN_S)
    def run(self) -> None:
        """Do this end's part of the plan."""
        self.follow(self._plan)

    @abc.abstractmethod
    def follow(self, plan: Plan) -> None:
        """Do it; return when the plan is done."""


class SupervisedEngine(Engine):
    """A supervisor with a queue actor, and the benchmark's producers and consumer."""

    version = __version__
    ends: ClassVar[dict[str, type[End]]]  # by name, in the order of their start, "producer" among them

    @abc.abstractmethod
    def queue(self, plan: Plan) -> ChildSpec:
        """Return the child that is the queue."""

    def start(self, plan: Plan) -> Any:
        ends = (
            ChildSpec(
                id=name,
                actor=actor,
                args={"plan": plan},
                replicas=plan.producers if name == "producer" else 1,
                restart=RestartType.TEMPORARY,
            )
            for name, actor in self.ends.items()
        )
        spec = SupervisorSpec(id="bench", intensity=Intensity(restarts=0), children=(self.queue(plan), *ends))
        folder = Path(plan.folder) / "run"
        folder.mkdir()
        self._tree = Supervisor(spec, run_dir=folder, zygotes={"default": ("numpy",)}).__enter__()

    def stop(self) -> None:
        self._tree.close()

    def launch(self, plan: Plan, shared: Any) -> Callable[[], bool]:  # noqa: ARG002 - the interface
        several = [f"producer/{n}" for n in range(plan.producers)] if plan.producers > 1 else ["producer"]
        names = [*(name for name in self.ends if name != "producer"), *several]
        self._runs = [self._tree.ref(name, self.ends[name.partition("/")[0]]).ask(End.run) for name in names]
        return lambda: all(not run.done() or run.exception() is None for run in self._runs)

    def join(self) -> None:
        for run in self._runs:
            run.result()

    def producer(self, shared: Any, plan: Plan, index: int) -> Producer:
        raise NotImplementedError("producers are actors")

    def consumer(self, shared: Any, plan: Plan) -> Consumer:
        raise NotImplementedError("the consumer is an actor")
