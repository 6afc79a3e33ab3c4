"""Monitors: what becomes of an actor, incarnation by incarnation, as an iterator.

Each incarnation gives its events in order: up (the process exists), ready (it takes calls), dying (it runs
no code any more), gone. Up, ready and dying come at most once; gone comes exactly once and ends it.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from enum import IntEnum

import msgspec

from relax_actor.supervision.events import Exit
from transport.closing import Closing


class Phase(IntEnum):
    """How far an incarnation has come."""

    UP = 1
    READY = 2
    DYING = 3
    GONE = 4


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One event of one incarnation."""

    phase: Phase
    name: str
    incarnation: int
    """0 where no incarnation has been seen."""
    exit: Exit | None = None
    """How it ended; None unless gone, and for one that was gone before the monitor began to look."""

    def __str__(self) -> str:
        how = "noproc" if self.exit is None else str(self.exit)
        tail = f" ({how})" if self.phase is Phase.GONE else ""
        return f"{self.name}#{self.incarnation} {self.phase.name.lower()}{tail}"


class Monitor(Closing):
    """The events of one actor, for `for` and `async for`; ends when it is closed or the tree is."""

    def __init__(self, name: str, hub: "MonitorHub") -> None:
        self.name = name
        self._hub = hub
        self._events: deque[Seen] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._wakers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def next(self, timeout_s: float | None = None) -> Seen | None:
        """Return the next event, or None when there will be none, or none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._is_closed, timeout_s)
            return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Stop looking; what waits for an event ends."""
        self._hub.leave(self)
        self.end()

    def put(self, seen: Seen) -> None:
        """Hand an event to whoever iterates."""
        with self._changed:
            self._events.append(seen)
            self._wake()

    def end(self) -> None:
        """Let iterations end after the events that are left."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def __iter__(self) -> Iterator[Seen]:
        while (seen := self.next()) is not None:
            yield seen

    async def __aiter__(self) -> AsyncIterator[Seen]:
        waker = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            self._wakers.append(waker)
        try:
            while (seen := await self._next_async(waker[1])) is not None:
                yield seen
        finally:
            with self._changed:
                self._wakers.remove(waker)

    async def _next_async(self, woken: asyncio.Event) -> Seen | None:
        while True:
            with self._changed:
                if self._events:
                    return self._events.popleft()
                if self._is_closed:
                    return None
                woken.clear()
            await woken.wait()

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, event in self._wakers:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(event.set)


class MonitorHub:
    """Who looks at whom, and how far the newest incarnation of everybody has come. Any thread."""

    def __init__(self) -> None:
        self._monitors: dict[str, list[Monitor]] = {}
        self._alive: dict[str, dict[int, list[Seen]]] = {}
        self._newest: dict[str, int] = {}
        self._is_closed = False
        self._lock = threading.RLock()

    def monitor(self, name: str) -> Monitor:
        """Begin to look: first at what runs now, or at once at nobody (gone, without an exit)."""
        monitor = Monitor(name, self)
        with self._lock:
            alive = self._alive.get(name, {})
            for seen in [each for history in alive.values() for each in history]:
                monitor.put(seen)
            if not alive:
                monitor.put(Seen(phase=Phase.GONE, name=name, incarnation=self._newest.get(name, 0)))
            if self._is_closed:
                monitor.end()
            else:
                self._monitors.setdefault(name, []).append(monitor)
        return monitor

    def leave(self, monitor: Monitor) -> None:
        """Forget a monitor."""
        with self._lock, contextlib.suppress(ValueError):
            self._monitors.get(monitor.name, []).remove(monitor)

    def note(self, phase: Phase, name: str, incarnation: int, exit_: Exit | None = None) -> None:
        """Tell the monitors of `name`, unless that was told already or the incarnation is over."""
        with self._lock:
            alive = self._alive.setdefault(name, {})
            is_new = incarnation > self._newest.get(name, 0)
            history = alive.get(incarnation, [] if is_new else None)
            if history is None or (history and history[-1].phase >= phase):
                return
            self._newest[name] = max(incarnation, self._newest.get(name, 0))
            seen = Seen(phase=phase, name=name, incarnation=incarnation, exit=exit_)
            alive[incarnation] = [*history, seen]
            if phase is Phase.GONE:
                del alive[incarnation]
            for monitor in self._monitors.get(name, ()):
                monitor.put(seen)

    def close(self) -> None:
        """End every iteration: the tree is down."""
        with self._lock:
            self._is_closed = True
            for monitors in self._monitors.values():
                for monitor in monitors:
                    monitor.end()
