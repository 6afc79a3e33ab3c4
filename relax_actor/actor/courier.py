"""What carries a process' messages: calls out, calls in, and the control line to the head.

Design. The sockets belong to no thread but to a lock (`transport.zmq_hub`): a call is sent by its caller's
thread, an answer by the thread that has it, and who waits reads (`watch`). What is left for the I/O thread is
what has its own time: deadlines, retries, and the sockets while everybody else is busy. User code never runs
with the lock held: calls that ended are collected, and their callers told when it is free.

Parts: `caller` has the calls this process makes, `serving` those that others make to it; both use `sockets`.
Here they are put together, and what is heard is handed to whom it concerns.

Invariants: those of `calls`; and records for `on_record` are handed over in the I/O thread, in order.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from relax_actor.actor import wire
from relax_actor.actor.bulk import NOTHING, BulkPool, BulkViews, Staged
from relax_actor.actor.callee import Callee
from relax_actor.actor.caller import RETRY_FULL_S, Caller
from relax_actor.actor.early_news import EarlyNews
from relax_actor.actor.io_thread import IoThread
from relax_actor.actor.lines import HeadLine, Lines
from relax_actor.actor.outbox import Outbox
from relax_actor.actor.releases import Releases
from relax_actor.actor.serving import Serving
from relax_actor.actor.sockets import Sockets
from relax_actor.actor.watch import Watch
from relax_actor.actor.wire import (
    AnyRecord,
    Call,
    Cancel,
    Carried,
    Dying,
    PeerGone,
    PeerUp,
    Probe,
    Query,
    Record,
    Unmapped,
)
from relax_actor.ids import Holder
from transport import codec
from transport.address import Address
from transport.control import Frames
from transport.errors import CodecError
from transport.security import CurveKeys
from transport.shm import ShmSpace
from transport.zmq_hub import Hub, Ready


class Courier:
    """Owns the process' sockets and its I/O thread.

    Args:
        holder: who this process is.
        run_id: refuses calls of other runs.
        address: where to bind.
        head: the head's address; None in the head itself.
        callee: who takes calls.
        on_record: takes any other record; I/O thread.
        space: where large frames go; None sends them in messages.
        remote: where to bind for peers on other hosts as well, if there are any.
        keys: of the run; needed for `tcp://`.
        head_line: keeps what is said between this process and a head on another host.

    Attributes:
        caller: makes calls.
        serving: answers calls.
        lines: to the processes of other hosts, in the head.
        watch: decides who reads; once started.
    """

    def __init__(
        self,
        holder: Holder,
        run_id: str,
        address: Address,
        *,
        head: Address | None = None,
        callee: Callee | None = None,
        on_record: Callable[[bytes, Record, Frames], None] = lambda _peer, _record, _frames: None,
        space: ShmSpace | None = None,
        remote: Address | None = None,
        keys: CurveKeys | None = None,
        head_line: HeadLine | None = None,
    ) -> None:
        self._callee, self._on_record, self._head_line = callee or Callee(), on_record, head_line
        self._hub = hub = Hub()
        self._lock = hub.lock
        self._thread = thread = IoThread(self._open, self._close)
        self.run_soon = thread.run_soon
        self._sockets = sockets = Sockets(
            hub, str(holder).encode(), address, head=head, remote=remote, keys=keys
        )
        self.refused: Counter[str] = Counter()
        self._pool, views = BulkPool(space, holder), BulkViews(space, self._released_one)
        self._outbox = Outbox(sockets.send, self._flush_outbox_later, self.refused)
        self.lines = Lines(self.send)
        self.caller = Caller(
            holder,
            run_id,
            hub=hub,
            sockets=sockets,
            thread=thread,
            pool=self._pool,
            views=views,
            callee=self._callee,
            refused=self.refused,
            decode=self._decode,
        )
        self._calls, self._settle = self.caller.calls, self.caller.settle
        self._releases = Releases(hub, self._calls, self._outbox, thread.wake)
        self.serving = Serving(
            holder,
            run_id,
            hub=hub,
            sockets=sockets,
            outbox=self._outbox,
            pool=self._pool,
            views=views,
            releases=self._releases,
            callee=self._callee,
            refused=self.refused,
        )
        self._early = EarlyNews(hub, self._decode, self._felt)
        self.watch: Watch

    # -- lifetime -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and return once the sockets are bound."""
        self._thread.start()

    def stop(self) -> None:
        """Flush what the sockets take, close them, end the thread and every call that waits."""
        self._thread.stop()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The I/O thread's, once started."""
        return self._thread.loop

    @property
    def remote_address(self) -> Address | None:
        """Where peers on other hosts reach this process, with the port it got."""
        return self._sockets.remote_address

    def hear_early(self, news: socket.socket) -> None:
        """Hear of deaths on this host as soon as they are felt, until the other end is closed.

        Args:
            news: not blocking; a datagram is a record. It is the courier's from now on.
        """
        self._early.hear(news)

    def read(self, ready: Ready | None = None, /) -> None:
        """Take in what has come, and tell callers whose calls ended; any thread. See `Hub.read`."""
        self._hub.read(ready)
        self._settle()

    def rename(self, holder: Holder) -> None:
        """Be somebody else from now on: a spare that was promoted; I/O thread."""
        with self._lock:
            self.caller.rename(holder)
            self.serving.holder = holder
            self._pool.rename(holder)
            self._sockets.rename(str(holder).encode())

    def status(self) -> dict[str, Any]:
        """Return how many calls are in flight to whom, with what credit, and what was not carried out."""
        return {
            "calls": self._calls.status(),
            "dead_letters": {
                str(reason): count for reason, count in self.serving.dead_letters.counts.items()
            },
            "refused": dict(self.refused),
            "shared_segments": self._pool.used_segments,
        }

    async def _open(self) -> None:
        with self._lock:
            self._callee.started()
            self._sockets.open(self._heard, self._heard_head)
            if self._head_line is not None:
                self._head_line.start(self.loop, self._send_head)
            self.watch = self.caller.waits.watch = Watch(self.loop, self._hub, self.read)

    def _close(self) -> None:
        self.watch.stop()
        with self._lock:
            self._calls.end_all("this process ends")
            self._pool.close()
            self._sockets.close()
            self._hub.close()
            self._early.close()
        self._settle()

    # -- speaking; any thread ---------------------------------------------------------------------

    def tell_head(self, record: Record) -> None:
        """Send a record to the head."""
        with self._lock:
            if self._head_line is not None:
                self._head_line.say(record)
            else:
                self._sockets.send_head([codec.encode(record)])

    def say(self, peer: bytes, record: Record, payload: Staged | Frames = NOTHING) -> None:
        """Send a record to whoever connected as `peer`; a peer that is gone is not told."""
        staged = payload if isinstance(payload, Staged) else Staged(frames=payload)
        with self._lock:
            if not self.lines.say(peer, record, staged.frames):
                self._outbox.say(peer, record, staged)

    def send(self, peer: bytes, frames: Frames) -> None:
        """Send frames to whoever connected as `peer`; see `Sockets.send`."""
        with self._lock:
            self._sockets.send(peer, frames)

    def _send_head(self, frames: Frames) -> None:
        with self._lock:
            self._sockets.send_head(frames)

    def _flush_outbox_later(self) -> None:
        self.run_soon(self.loop.call_later, RETRY_FULL_S, self._flush_outbox)

    def _flush_outbox(self) -> None:
        with self._lock:
            self._outbox.flush()

    def _released_one(self, segment: str) -> None:
        self._releases.add(segment)

    # -- who is there; any thread -----------------------------------------------------------------

    def peer_up(self, up: PeerUp) -> None:
        """Send calls for this actor to this incarnation from now on."""
        with self._lock:
            self.caller.up(up)
        self._settle()

    def peer_dying(self, dying: Dying) -> None:
        """Fail at once what will have no answer, the rest when a reply had time to arrive."""
        with self._lock:
            self.caller.dying(dying)
        self._settle()

    def peer_gone(self, gone: PeerGone) -> None:
        """Fail or keep the calls that were with this incarnation, but for those whose answer is here."""
        self._hub.catch_up()
        with self._lock:
            self.caller.gone(gone)
        self._settle()

    # -- what is heard; with the lock held --------------------------------------------------------

    def _heard(self, peer: bytes, frames: Frames) -> None:
        record = self._decode(frames)
        match record:
            case Call():
                self.serving.called(peer, record, frames)
            case Cancel():
                self._callee.cancel(peer, record.id)
            case Query():
                self.serving.queried(peer, record)
            case Probe():
                self.caller.waits.probed(peer, record)
            case Unmapped():
                self._pool.release(record.segments, peer.decode(errors="replace"))
            case Carried():
                if (message := self.lines.receive(peer, record, frames[1:])) is not None:
                    self.run_soon(self._on_record, peer, *message)
            case None:
                return
            case _:
                self.run_soon(self._on_record, peer, record, frames[1:])

    def _felt(self, dying: Dying) -> None:
        """Take a death notice, for the calls in hand; the rest is done when it comes over the line."""
        if self._calls.knows(dying.name):
            self.caller.dying(dying)

    def _heard_head(self, frames: Frames) -> None:
        record, frames = self._decode(frames), frames[1:]
        if isinstance(record, Carried) and self._head_line is not None:
            record, frames = self._head_line.receive(record, frames) or (None, frames)
        if isinstance(record, PeerUp):
            self.caller.up(record)
        elif isinstance(record, Dying):
            self.caller.dying(record)
        elif isinstance(record, PeerGone):
            self.caller.gone(record)
        if record is not None:
            self.run_soon(self._on_record, b"", record, frames)

    def _decode(self, frames: Frames) -> AnyRecord | None:
        try:
            return wire.decode(frames[0])
        except CodecError:
            self.refused["malformed"] += 1
            return None
