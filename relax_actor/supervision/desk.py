"""What all nodes of one tree share while an event is handled: time, chance, orders, names and timers."""

import random
from typing import Protocol

from relax_actor.supervision.commands import CancelTimer, Command, Report, ReportKind, SetTimer


class Sleeper(Protocol):
    """Whoever set a timer."""

    def timer_fired(self) -> None:
        """React to the timer that ran out."""
        ...


class Unsettled(Protocol):
    """A supervisor that has something to decide."""

    def advance(self) -> None:
        """Take every step that is possible now."""
        ...


class Desk:
    """The one mutable thing handed to every node; nodes never call up or down while one of them decides.

    A node that changed marks its supervisor, and `settle` lets the marked ones decide in turn, so that
    no decision is taken in the middle of another.
    """

    def __init__(self, rng: random.Random, consult_s: float | None = None) -> None:
        self.rng = rng
        self.consult_s = consult_s  # how long `on_failure` may take; None: nobody is asked
        self.now = 0.0
        self.commands: list[Command] = []
        self.incarnations: dict[str, int] = {}  # for ever, so that none repeats
        self.killed: list[str] = []  # who was over its time to stop
        self._timers: dict[str, Sleeper] = {}
        self._unsettled: list[Unsettled] = []

    def report(self, kind: ReportKind, **fields: object) -> None:
        """Order one event to be logged."""
        self.commands.append(Report(kind=kind, fields=fields))

    def take_commands(self) -> list[Command]:
        """Return the orders so far and begin a new list."""
        commands, self.commands = self.commands, []
        return commands

    def set_timer(self, timer: str, delay_s: float, sleeper: Sleeper) -> None:
        """Order a timer; its id must be new."""
        self._timers[timer] = sleeper
        self.commands.append(SetTimer(timer=timer, delay_s=delay_s))

    def cancel_timer(self, timer: str) -> None:
        """Forget a timer that is running."""
        del self._timers[timer]
        self.commands.append(CancelTimer(timer=timer))

    def fire(self, timer: str) -> None:
        """Wake whoever set the timer; one that was cancelled meanwhile wakes nobody."""
        sleeper = self._timers.pop(timer, None)
        if sleeper is not None:
            sleeper.timer_fired()

    def next_incarnation(self, name: str) -> int:
        """Count a start of `name`, from 1."""
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        return self.incarnations[name]

    def mark(self, supervisor: Unsettled) -> None:
        """Let a supervisor decide before the event is done with."""
        if supervisor not in self._unsettled:
            self._unsettled.append(supervisor)

    def settle(self) -> None:
        """Let the marked supervisors decide until nobody has anything left to do."""
        while self._unsettled:
            self._unsettled.pop(0).advance()
