"""Our actors, through the public API only: `ask(...).result()` from the program's main thread."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from actors.engine import Engine
from actors.work import Work
from relax_actor import (
    Actor,
    Backoff,
    ChildSpec,
    Intensity,
    Ref,
    RestartType,
    Supervisor,
    SupervisorSpec,
    __version__,
    endpoint,
    gather,
)
from relax_actor.supervision.spec import SpecError, actor_names

PRELOADED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "ours": {"default": ("numpy",)},
    "ours_torch": {"default": ("torch", "numpy")},
}
"""What the zygote has imported before it forks."""

ENDLESS = Intensity(restarts=100_000)
"""Deaths are the work here; they must not end the supervisor."""


class OurWork(Actor):
    """The work as an actor of ours."""

    ping = endpoint(idempotent=True)(Work.ping)  # asked across a restart
    echo = endpoint(Work.echo)
    sleep = endpoint(timeout_s=600.0)(Work.sleep)
    consume = endpoint(Work.consume)
    make = endpoint(Work.make)
    give = endpoint(Work.give)
    hold = endpoint(timeout_s=120.0)(Work.hold)
    child = endpoint(Work.child)
    boom = endpoint(Work.boom)
    boom_unsendable = endpoint(Work.boom_unsendable)


class Ours(Engine):
    """One supervisor; actors are added to it and removed."""

    version = __version__
    settle_s = 0.2
    kill_waits_s = (0.3,) * 20  # many, for the 99th percentile
    big_kills = 5
    restarts = 10

    def __init__(self, preloaded: Mapping[str, Sequence[str]]) -> None:
        self._preloaded = preloaded
        self._ids = itertools.count()
        self._specs: dict[str, ChildSpec] = {}
        self._tree: Supervisor

    async def start(self) -> None:
        first = ChildSpec(id="first", actor=OurWork)  # a tree without children is ready before its zygote is
        root = SupervisorSpec(id="bench", intensity=ENDLESS, children=(first,))
        self._tree = Supervisor(root, zygotes=self._preloaded).__enter__()
        self._tree.remove_child("first")

    async def spawn(self, count: int, *, restartable: bool = False) -> list[Any]:
        spec = ChildSpec(
            id=f"w{next(self._ids)}",
            actor=OurWork,
            replicas=count,
            restart=RestartType.PERMANENT if restartable else RestartType.TEMPORARY,
            backoff=Backoff(base_s=0.0),  # what is measured is the restart, not the wait before it
        )
        self._tree.add_child("bench", spec)
        names = actor_names(spec)
        self._specs |= dict.fromkeys(names, spec)
        return [self._tree.ref(name, OurWork) for name in names]

    def submit(self, actor: Ref[OurWork], method: str, *args: Any) -> Any:
        return actor.ask(getattr(OurWork, method), *args)

    async def wait(self, pending: Future[Any], timeout_s: float | None = None) -> Any:
        return pending.result(timeout_s)

    async def call_within(self, timeout_s: float, actor: Ref[OurWork], method: str) -> Any:
        return self.submit(actor.within(timeout_s), method).result()

    async def broadcast(self, actors: list[Ref[OurWork]], array: Any) -> list[int]:
        """Ask all at once: the array is written once for all of them."""
        return gather(actors, OurWork.consume, array).result()

    async def drop(self, actors: list[Ref[OurWork]]) -> None:
        for spec_id in {self._specs.pop(actor.name).id for actor in actors}:
            with contextlib.suppress(SpecError):  # a temporary child that died is forgotten
                self._tree.remove_child(spec_id)

    async def stop(self) -> None:
        self._tree.close()


def engine(name: str) -> Engine:
    return Ours(PRELOADED[name])
