"""Spares: processes that have run an actor's `__init__` and wait for the name of one that dies.

A spare has no identity of its own but a number: nobody can call it, and what it might send is refused,
until it is promoted and becomes the next incarnation of the dead.
"""

from collections.abc import Iterator

from relax_actor.ids import SPARE
from relax_actor.supervision.commands import Kill, Promote, ReportKind, SpawnSpare
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.events import Exit
from relax_actor.supervision.node import Parent
from relax_actor.supervision.spec import Backoff, ChildSpec

REFILL_AFTER_S = 0.2
"""How long after a takeover the next spare is started: the first calls of the new incarnation go first."""


class Spare:
    """One waiting process."""

    def __init__(self, name: str, pool: "SparePool", desk: Desk) -> None:
        self.name = name
        self.is_ready = self.is_dying = False
        self._pool, self._desk = pool, desk
        self._timer = f"{name}:start"

    def start(self, spec: ChildSpec) -> None:
        """Spawn it and give it `start_timeout_s` to run its `__init__`."""
        self._desk.commands.append(SpawnSpare(name=self.name, spec=spec))
        self._desk.set_timer(self._timer, spec.start_timeout_s, self)

    def ready(self) -> None:
        """Note that it waits for a name."""
        if not self.is_dying:
            self.is_ready = True
            self.forget_timer()

    def kill(self) -> None:
        """Kill it: it owns nothing that it could clean up."""
        if not self.is_dying:
            self.is_dying = True
            self.forget_timer()
            self._desk.commands.append(Kill(name=self.name, incarnation=1))

    def forget_timer(self) -> None:
        """Call its deadline off."""
        if self._timer:
            self._desk.cancel_timer(self._timer)
            self._timer = ""

    def timer_fired(self) -> None:
        """Give up on one that is not ready in time."""
        self._timer = ""
        self.kill()


class SparePool:
    """The spares of one child spec.

    Args:
        spec: whose replicas they stand in for.
        backoff: how long to wait after one that was lost.
        parent: who is woken when something may be done.
        desk: what the whole tree shares.
    """

    def __init__(self, spec: ChildSpec, backoff: Backoff, parent: Parent, desk: Desk) -> None:
        self._spec, self._parent, self._desk = spec, parent, desk
        self._backoff = spec.backoff or backoff
        self._spares: dict[str, Spare] = {}
        self._failures = 0  # in a row
        self._timer = ""
        self._is_draining = False

    @property
    def has_ready(self) -> bool:
        """Whether one can take over now."""
        return any(spare.is_ready and not spare.is_dying for spare in self._spares.values())

    @property
    def is_empty(self) -> bool:
        """Whether no process of it is left."""
        return not self._spares

    def __iter__(self) -> Iterator[Spare]:
        """Return the spares, the oldest first."""
        return iter(list(self._spares.values()))

    def fill(self) -> None:
        """Start what is missing, unless one was lost or taken just now."""
        while not self._is_draining and not self._timer and len(self._spares) < self._spec.spares:
            name = f"{self._spec.id}/{SPARE}"
            spare = Spare(f"{name}/{self._desk.next_incarnation(name)}", self, self._desk)
            self._spares[spare.name] = spare
            spare.start(self._spec)

    def ready(self, spare: Spare) -> None:
        """Note that one waits for a name."""
        spare.ready()
        if spare.is_ready:
            self._failures = 0
            self._desk.report(ReportKind.SPARE_READY, spare=spare.name)

    def take(self, name: str, incarnation: int, replica: int) -> bool:
        """Have the oldest ready spare become an incarnation; return whether there was one."""
        spare = next((each for each in self._spares.values() if each.is_ready and not each.is_dying), None)
        if spare is None:
            return False
        del self._spares[spare.name]
        self._desk.commands.append(
            Promote(spare=spare.name, name=name, incarnation=incarnation, spec=self._spec, replica=replica)
        )
        self._desk.report(ReportKind.RESTART_BY_SPARE, child=name, incarnation=incarnation, spare=spare.name)
        self._wait(REFILL_AFTER_S, spare)
        return True

    def gone(self, spare: Spare, exit_: Exit) -> None:
        """Forget one that is over; its loss is no child's failure, but the next one waits a little."""
        spare.forget_timer()
        del self._spares[spare.name]
        if not self._is_draining:
            self._failures += 1
            self._desk.report(ReportKind.SPARE_LOST, spare=spare.name, reason=str(exit_))
            self._wait(self._backoff.delay(self._failures, self._desk.rng), spare)
        self._parent.wake()

    def drain(self) -> None:
        """Kill all of them and start no more."""
        self._is_draining = True
        if self._timer:
            self._desk.cancel_timer(self._timer)
            self._timer = ""
        for spare in self._spares.values():
            spare.kill()

    def timer_fired(self) -> None:
        """Let the missing ones be started."""
        self._timer = ""
        self._parent.wake()

    def _wait(self, delay_s: float, last: Spare) -> None:
        if not self._timer:
            self._timer = f"{last.name}:refill"
            self._desk.set_timer(self._timer, delay_s, self)
