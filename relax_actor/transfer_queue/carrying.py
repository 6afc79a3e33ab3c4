"""A peer's end of its row link with a dock: sends parcels, asks for rows, and says what became of both.

Two threads: one sends, straight from where a parcel lies, another receives, straight to where a row belongs;
so neither end ever waits for the other to listen. What is asked for overtakes parcels between two of their
parts. The link is opened when there is something to send, and kept. When it breaks, all that was on its way
fails, and whoever handed it over hands it over again; what was not sent yet goes by the next link.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from relax_actor.actor.failure import rebuild
from relax_actor.errors import ActorError
from relax_actor.transfer_queue.dock import Berth
from relax_actor.transfer_queue.link_jobs import Job, ParcelJob, WantJob
from relax_actor.transfer_queue.parcels import (
    Refused,
    RowLinkError,
    RowSlice,
    read_down,
)
from relax_actor.transfer_queue.storage import PATIENCE_S
from transport.errors import TransportError
from transport.stream import Stream, StreamTimeoutError

STALL_S: Final = 3 * PATIENCE_S
"""A link on which nothing moves for so long is given up: longer than a dock waits for memory."""

RETRY_S: Final = 0.1
"""How soon a link is opened again after that failed."""

LOOK_FRAC: Final = 0.25

Dial = Callable[[], Stream]
"""Opens a stream to the dock; may raise `ActorError` or `TransportError`."""

BROKEN: Final = (ActorError, TransportError, RowLinkError)


class Carrier:
    """One peer's way to a dock; any thread.

    Args:
        dock: its name.
        dial: how to reach it.
        wake: called after each answer.
    """

    def __init__(self, dock: str, dial: Dial, wake: Callable[[], None] = lambda: None) -> None:
        self._dock, self._dial, self._wake = dock, dial, wake
        self._changed = threading.Condition()
        self._parcels: deque[Job] = deque()
        self._wants: deque[Job] = deque()
        self._link: _Link | None = None
        self._old: _Link | None = None
        self._sender: threading.Thread | None = None
        self._is_closed = False

    def send(self, parcel: int, data: memoryview, *, is_repeated: bool) -> "Future[Berth]":
        """Bring a parcel to the dock; its bytes must stay as they are until the future has ended.

        Args:
            parcel: its number, which no other parcel of this incarnation has.
            data: at least one byte.
            is_repeated: whether it was sent before.

        Returns:
            Where it lies then. Ends with a `RemoteError` where the dock refuses it, and with an `ActorError`,
            `TransportError` or `RowLinkError` where the link broke.
        """
        return self._add(self._parcels, ParcelJob(parcel, data, is_repeated=is_repeated))

    def want(self, slices: Sequence[RowSlice], targets: Sequence[memoryview]) -> "Future[list[bool]]":
        """Bring bytes from the dock's host to `targets`, one for each slice.

        Returns:
            For each slice whether it was there; ends otherwise as for `send`.
        """
        return self._add(self._wants, WantJob(slices, targets))

    def close(self) -> None:
        """End the link; what is on its way fails."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if (link := self._link) is not None:
            link.stream.end()

    # -- the thread that sends ------------------------------------------------------------------

    def _add(self, queue: deque[Job], job: Job) -> Future[Any]:
        job.future.set_running_or_notify_cancel()  # it ends by itself: nobody cancels it
        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                queue.append(job)
                self._start()
                self._changed.notify()
        if is_closed:
            self._fail([job], RowLinkError(self._dock, "was closed"))
        return job.future

    def _start(self) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._run, name="row-sender", daemon=True)
            self._sender.start()

    def _run(self) -> None:
        while self._has_work():
            try:
                link = self._link or self._opened()
            except Exception as error:  # noqa: BLE001 - who handed over decides
                self._fail(self._taken_all(), error)
                time.sleep(RETRY_S)
            else:
                if (job := self._next()) is not None:
                    self._send(link, job)
        self._forget_old()
        self._fail(self._taken_all(), RowLinkError(self._dock, "was closed"))

    def _has_work(self) -> bool:
        with self._changed:
            while not (self._wants or self._parcels or self._is_closed):
                self._changed.wait()
            return not self._is_closed

    def _next(self) -> Job | None:
        with self._changed:
            queue = self._wants or self._parcels
            return queue.popleft() if queue else None

    def _taken_all(self) -> list[Job]:
        with self._changed:
            jobs = [*self._wants, *self._parcels]
            self._wants.clear()
            self._parcels.clear()
            return jobs

    def _opened(self) -> "_Link":
        self._forget_old()
        link = _Link(self._dial())
        with self._changed:
            self._link = self._old = link
        link.hearing = threading.Thread(target=self._hear, args=(link,), name="row-receiver", daemon=True)
        link.hearing.start()
        return link

    def _forget_old(self) -> None:
        """Wait until nothing is received by the last link: its targets may be another one's soon."""
        old, self._old = self._old, None
        if old is not None:
            old.stream.end()
            old.hearing.join()
            old.stream.close()

    def _send(self, link: "_Link", job: Job) -> None:
        number = link.add(job)
        try:
            for record, payload in job.frames(number):
                link.stream.send(record, *payload)
                link.moved = time.monotonic()
                while self._wants and (wanted := self._next()) is not None:
                    self._send_whole(link, wanted)
        except Exception as error:  # noqa: BLE001 - as above
            self._lost(link, error)

    def _send_whole(self, link: "_Link", job: Job) -> None:
        number = link.add(job)
        for record, payload in job.frames(number):
            link.stream.send(record, *payload)

    # -- the thread that receives ---------------------------------------------------------------

    def _hear(self, link: "_Link") -> None:
        try:
            while True:
                if link.stream.is_spoken_to(STALL_S * LOOK_FRAC):
                    self._take(link, *link.stream.receive())
                elif link.is_stalled():
                    raise StreamTimeoutError(self._dock, f"answered nothing for {STALL_S:g} s")  # noqa: TRY301 - one way to lose it
        except Exception as error:  # noqa: BLE001 - as above
            self._lost(link, error)

    def _take(self, link: "_Link", record: bytes, nbytes: int) -> None:
        said = read_down(record, self._dock)
        job = link.sent.get(said.number)
        if job is None:
            raise RowLinkError(self._dock, f"answered what nobody asked: {said!r}")
        result = None if isinstance(said, Refused) else job.take(link.stream, said, nbytes)
        if not link.is_answered(said.number):
            return  # lost meanwhile, and told so
        if isinstance(said, Refused):
            job.future.set_exception(rebuild(self._dock, said.failed))
        else:
            job.future.set_result(result)
        self._wake()

    # -- either ---------------------------------------------------------------------------------

    def _lost(self, link: "_Link", error: Exception) -> None:
        with self._changed:
            if self._link is link:
                self._link = None
        link.stream.end()
        self._fail(link.lose(), error)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        for job in jobs:
            job.future.set_exception(error)
        if jobs:
            self._wake()


class _Link:
    """A stream, and what was sent by it and is not answered yet."""

    hearing: threading.Thread

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.moved = time.monotonic()
        self.sent: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, job: Job) -> int:
        """Note what is about to be sent; return its number."""
        with self._lock:
            number = next(self._numbers)
            self.sent[number] = job
        self.moved = time.monotonic()
        return number

    def is_answered(self, number: int) -> bool:
        """Note an answer; return whether anybody waits for it still."""
        self.moved = time.monotonic()
        with self._lock:
            return self.sent.pop(number, None) is not None

    def lose(self) -> list[Job]:
        """Return what will never be answered."""
        with self._lock:
            jobs = [*self.sent.values()]
            self.sent.clear()
        return jobs

    def is_stalled(self) -> bool:
        """Whether somebody waits, and nothing moves."""
        return bool(self.sent) and time.monotonic() - self.moved > STALL_S
