"""What signals do to a run: the first INT, TERM or HUP asks it to stop, the second has everything killed.

USR2 is a scheduler's warning: the run is to keep a checkpoint and make room. It is no first signal, so that
whoever does not want to wait for that can still ask for a stop, and then for the end.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)

ECHO_S = 1.0
"""A second SIGTERM so soon is the first one's: Slurm sends it to every process of a job, and the batch
script passes it on as well."""


class Control(Protocol):
    """How a run is told to end; `relax_actor.app.RunControl`."""

    def preempt(self, reason: str) -> None:
        """End after the step at hand, with a checkpoint."""
        ...

    def stop(self, reason: str) -> None:
        """End in order: every actor gets its time to stop."""
        ...

    def kill(self, reason: str) -> None:
        """Kill everything now."""
        ...


class Ended(Protocol):
    """How a run ended; `relax_actor.app.Outcome`."""

    @property
    def exit_code(self) -> int:
        """0 where it is done."""
        ...

    @property
    def reason(self) -> str:
        """Why, naming the actor where one failed."""
        ...


class Signals:
    """Turns signals into preemption, stop and kill; remembers the one that the run ends for."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._since_s = 0.0
        self._control: Control | None = None

    def obey(self, control: Control) -> None:
        """Send signals to this control, one that came too early included."""
        self._control = control
        if self.first is not None:
            self._tell(control, self.first)

    def exit_code(self, outcome: Ended) -> int:
        """Return 128 + the first signal's number where it ended the run; a run that is done is done."""
        return outcome.exit_code if self.first is None or not outcome.exit_code else 128 + self.first

    def handle(self, number: int, _: FrameType | None) -> None:
        """Take one signal, in the main thread."""
        is_first = self.first in {None, signal.SIGUSR2}
        if (number == signal.SIGUSR2 and self.first is not None) or self._is_echo(number):
            return
        if is_first:
            self.first, self._since_s = number, time.monotonic()
        if self._control is not None and is_first:
            self._tell(self._control, number)
        elif self._control is not None:
            self._control.kill(signal.Signals(number).name)

    def _is_echo(self, number: int) -> bool:
        is_same = number == self.first == signal.SIGTERM
        return is_same and time.monotonic() - self._since_s < ECHO_S

    def _tell(self, control: Control, number: int) -> None:
        tell = control.preempt if number == signal.SIGUSR2 else control.stop
        tell(signal.Signals(number).name)


@contextmanager
def catching() -> Iterator[Signals]:
    """Yield what takes the signals of `SIGNALS` while the block runs."""
    signals = Signals()
    before: Mapping[signal.Signals, object] = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal returned
