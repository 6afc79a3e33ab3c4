"""What carries a process' messages: calls out, calls in, and the control line to the head.

Design. The sockets belong to no thread but to a lock (`transport.zmq_hub`): a call is sent by its caller's
thread, an answer by the thread that has it, and who waits reads (`watch`). What is left for the I/O thread is
what has its own time: deadlines, retries, and the sockets while everybody else is busy. User code never runs
with the lock held: calls that ended are collected, and their callers told when it is free.

Invariants: those of `calls`; and records for `on_record` are handed over in the I/O thread, in order.
"""

import asyncio
import itertools
import math
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent import futures
from typing import Any, Final

import msgspec

from relax_actor.actor import cycles, failure, wire
from relax_actor.actor.base import EndpointOptions
from relax_actor.actor.bulk import NOTHING, BulkPool, BulkViews, Staged
from relax_actor.actor.calls import Calls, Ended, Peer, Pending
from relax_actor.actor.convert import convert, signature_of
from relax_actor.actor.cycles import PROBE_AFTER_S, PROBE_AGAIN_S, Wait
from relax_actor.actor.lines import HeadLine, Lines
from relax_actor.actor.mailbox import DeadLetters, DeadReason, Incoming
from relax_actor.actor.outbox import Outbox
from relax_actor.actor.ref import Reply
from relax_actor.actor.watch import Watch
from relax_actor.actor.wire import (
    AnyRecord,
    Call,
    Cancel,
    Carried,
    Credit,
    Dying,
    Failed,
    PeerGone,
    PeerUp,
    Probe,
    Query,
    Record,
    Result,
    Unmapped,
)
from relax_actor.errors import DeadlockError, SerializationError
from relax_actor.ids import Holder
from transport import codec
from transport.address import Address
from transport.control import Channel, Frames, Listener
from transport.errors import ChannelClosed, CodecError, PeerUnreachable
from transport.security import CurveKeys
from transport.shm import ShmSpace, parse_name
from transport.zmq_control import ZmqNetwork
from transport.zmq_hub import Hub

RETRY_FULL_S: Final = 0.001
"""How soon a send that met a full channel is tried again."""


EARLY_BYTES: Final = 64 * 1024

LATE_REPLY_S: Final = 0.02
"""How long a dead actor's last replies may still be read for."""


class Callee:
    """What a courier asks of the process it carries calls to; this one takes none. With the lock held."""

    def started(self) -> None:
        """Begin, before the sockets are bound; I/O thread."""

    def take(self, incoming: Incoming) -> bool:
        """Put a call into the mailbox; False where it is full."""
        del incoming
        return False

    def cancel(self, peer: bytes, call_id: int) -> None:
        """Do not start a call, or stop it."""

    def is_open(self, peer: bytes, call_id: int) -> bool:
        """Whether a call is here and not answered."""
        del peer, call_id
        return False

    def answer(self, what: str) -> Any:
        """Answer a question about the process."""
        raise KeyError(what)

    def reply_ended(self) -> None:
        """Learn that a call that this process made has ended; without the lock."""

    def main_ident(self) -> int | None:
        """Return the thread that handles messages, if there is one."""
        return None


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
        self._holder, self._run_id = holder, run_id
        self._identity = str(holder).encode()
        self._address, self._head_address = address, head
        self._callee, self._on_record = callee or Callee(), on_record
        self._hub = Hub()
        self._lock = self._hub.lock
        self._pool, self._views = BulkPool(space, holder), BulkViews(space, self._released_one)
        self._calls = Calls(holder, run_id, self._pool, self._flush_later, self._expire_soon)
        self.refused: Counter[str] = Counter()
        self.dead_letters = DeadLetters()
        self._outbox = Outbox(self.send, self._flush_outbox_later, self.refused)
        self._remote, self._keys, self._head_line = remote, keys, head_line
        self.lines = Lines(self.send)
        self._listener: Listener
        self._remote_listener: Listener | None = None
        self._routes: dict[bytes, Listener] = {}  # of peers on other hosts
        self._ids = itertools.count(1)
        self._wait: Wait | None = None
        self._released: deque[str] = deque()
        self._news: set[socket.socket] = set()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._actions: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._drain_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._head: Channel | None = None
        self.loop: asyncio.AbstractEventLoop
        self.watch: Watch
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    # -- lifetime -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and return once the sockets are bound."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Flush what the sockets take, close them, end the thread and every call that waits."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def run_soon(self, action: Callable[..., object], *args: Any) -> None:
        """Run `action` in the I/O thread, in the order of the calls; a stopped courier drops it.

        The loop is woken once for all that is handed over before it looks.
        """
        self._actions.append((action, args))
        if not self._drain_is_due:
            self._drain_is_due = True
            self._wake_loop(self._drain)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `read`."""
        return self._hub.fileno()

    def hear_early(self, news: socket.socket) -> None:
        """Hear of deaths on this host as soon as they are felt, until the other end is closed.

        Args:
            news: not blocking; a datagram is a record. It is the courier's from now on.
        """
        with self._lock:
            self._news.add(news)
            self._hub.add_reader(news.fileno(), lambda: self._heard_early(news))

    def read(self) -> None:
        """Take in what has come, and tell callers whose calls ended; any thread."""
        self._hub.read()
        self._settle()

    def _drain(self) -> None:
        self._drain_is_due = False  # before looking: what comes after this wakes the loop again
        for _ in range(len(self._actions)):
            action, args = self._actions.popleft()
            try:
                action(*args)
            except Exception as error:  # noqa: BLE001 - one message's failure is not the thread's
                self.loop.call_exception_handler({"message": f"{action!r} failed", "exception": error})

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            try:
                with self._lock:
                    network = runner.run(self._open())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that called start
                self._failure = error
                self._started.set()
                return
            self._started.set()
            try:
                self.loop.run_forever()
            finally:
                self._close(network)

    async def _open(self) -> ZmqNetwork:
        self._callee.started()
        network = ZmqNetwork(keys=self._keys, hub=self._hub)
        self._network = network
        self._listener = network.listen(self._address, self._heard)
        if self._remote is not None:
            self._remote_listener = network.listen(self._remote, self._heard_remote)
        if self._head_address is not None:
            self._head = network.connect(self._head_address, self._heard_head, identity=self._identity)
            if self._head_line is not None:
                self._head_line.start(self.loop, self._send_head)
        self.watch = Watch(self.loop, self._hub, self.read)
        return network

    @property
    def remote_address(self) -> Address | None:
        """Where peers on other hosts reach this process, with the port it got."""
        return self._remote_listener.address if self._remote_listener else None

    def _close(self, network: ZmqNetwork) -> None:
        self.watch.stop()
        with self._lock:
            self._calls.end_all("this process ends")
            self._pool.close()
            network.close()
            self._hub.close()
            for news in self._news:
                news.close()
        self._settle()

    # -- speaking -------------------------------------------------------------------------------

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, writable: bool) -> Staged:
        """Make arguments ready to be sent; see `Ref.pack`."""
        try:
            if not kwargs and all(map(codec.is_scalar, args)):
                frames: Frames = (codec.pack_scalars((args, kwargs)),)
            else:
                frames = codec.pack([list(args), kwargs])
        except CodecError as error:
            raise SerializationError(str(error)) from error
        return self._pool.stage(frames, writable=writable)

    def ask(
        self,
        name: str,
        method: Callable[..., Any],
        payload: Staged,
        *,
        timeout_s: float,
        options: EndpointOptions,
        pinned: int | None,
        wants_reply: bool,
        only_now: bool,
    ) -> Reply[Any]:
        """Send a call; any thread. See `Ref.ask`."""
        pending = Pending(
            name=name,
            method=method.__name__,
            payload=payload,
            deadline=time.monotonic() + timeout_s,
            timeout_s=timeout_s,
            idempotent=options.idempotent,
            pinned=pinned,
            reply=Reply(),
            returns=signature_of(method).returns,
            wants_reply=wants_reply,
        )
        return self._submit(pending, only_now=only_now)

    def query(self, name: str, what: str, returns: Any, timeout_s: float) -> Reply[Any]:
        """Ask the I/O thread of an actor; any thread. See `Ref.control`."""
        pending = Pending(
            name=name,
            method=f"control.{what}",
            payload=NOTHING,
            deadline=time.monotonic() + timeout_s,
            timeout_s=timeout_s,
            idempotent=True,
            pinned=None,
            reply=Reply(),
            returns=returns,
            wants_reply=True,
            query=what,
        )
        return self._submit(pending)

    def _submit(self, pending: Pending, *, only_now: bool = False) -> Reply[Any]:
        with self._lock:
            pending.id = next(self._ids)  # here: the calls to one actor are numbered as they are sent
            pending.reply.call, pending.reply.waiter = (pending.name, pending.id), self
            self._calls.submit(pending, only_now=only_now)
        if self._calls.ended:
            self._settle()
        return pending.reply

    def incarnation_of(self, name: str) -> int | None:
        """Return the incarnation that takes calls now, if any."""
        peer = self._calls.peer(name)
        return None if peer.dying else peer.incarnation

    def respond(self, incoming: Incoming, value: Any) -> None:
        """Answer a call with what its method returned; any thread.

        Raises:
            CodecError: it cannot be sent.
        """
        if self._released:  # before the answer, so that the caller's next argument finds the segment free
            self._tell_released()
        if incoming.call.wants_reply:
            payload = self._stage_for(incoming.peer, value)
            answer = Result(id=incoming.call.id, body=payload.body, bulk=payload.refs)
            self.say(incoming.peer, answer, payload)

    def refuse(self, incoming: Incoming, failed: Failed) -> None:
        """Answer a call with a failure; any thread."""
        if incoming.call.wants_reply:
            self.say(incoming.peer, failed)

    def tell_head(self, record: Record) -> None:
        """Send a record to the head; any thread."""
        with self._lock:
            if self._head_line is not None:
                self._head_line.say(record)
            else:
                self._send_head([codec.encode(record)])

    def rename(self, holder: Holder) -> None:
        """Be somebody else from now on: a spare that was promoted; I/O thread."""
        with self._lock:
            self._holder, self._identity = holder, str(holder).encode()
            self._calls.rename(holder)
            self._pool.rename(holder)
            if self._head is not None and self._head_address is not None:
                self._head.close()
                self._head = self._network.connect(
                    self._head_address, self._heard_head, identity=self._identity
                )

    def say(self, peer: bytes, record: Record, payload: Staged | Frames = NOTHING) -> None:
        """Send a record to whoever connected as `peer`; any thread. A peer that is gone is not told."""
        staged = payload if isinstance(payload, Staged) else Staged(frames=payload)
        with self._lock:
            if not self.lines.say(peer, record, staged.frames):
                self._outbox.say(peer, record, staged)

    def send(self, peer: bytes, frames: Frames) -> None:
        """Send frames to whoever connected as `peer`; any thread.

        Raises:
            ChannelFull: the peer does not keep up.
            PeerUnreachable: it is not connected.
            ChannelClosed: this process is ending.
        """
        with self._lock:
            try:
                self._routes.get(peer, self._listener).send(peer, frames)
            except (PeerUnreachable, ChannelClosed):
                self._routes.pop(peer, None)
                raise

    def _send_head(self, frames: Frames) -> None:
        with self._lock:
            if self._head is not None:
                self._head.send(frames)

    def _stage_for(self, peer: bytes, value: Any) -> Staged:
        frames = codec.pack(value)
        return self._pool.stage(frames, writable=True, local=peer not in self._routes)

    def peer_up(self, up: PeerUp) -> None:
        """Send calls for this actor to this incarnation from now on; any thread."""
        with self._lock:
            self._up(up)
        self._settle()

    def peer_dying(self, dying: Dying) -> None:
        """Fail at once what will have no answer, the rest when a reply had time to arrive; any thread."""
        with self._lock:
            self._dying(dying)
        self._settle()

    def peer_gone(self, gone: PeerGone) -> None:
        """Fail or keep the calls that were with this incarnation; any thread."""
        with self._lock:
            self._gone(gone)
        self._settle()

    def status(self) -> dict[str, Any]:
        """Return how many calls are in flight to whom, with what credit, and what was not carried out."""
        return {
            "calls": self._calls.status(),
            "dead_letters": {str(reason): count for reason, count in self.dead_letters.counts.items()},
            "refused": dict(self.refused),
            "shared_segments": self._pool.used_segments,
        }

    def _up(self, up: PeerUp) -> None:
        self._calls.up(up, lambda peer: self._connect(peer, Address.parse(up.address)))

    def _dying(self, dying: Dying) -> None:
        if self._calls.dying(dying):
            self.run_soon(self.loop.call_later, LATE_REPLY_S, self._forget, dying)

    def _forget(self, dying: Dying) -> None:
        with self._lock:
            self._calls.forget(dying)
        self._settle()

    def _gone(self, gone: PeerGone) -> None:
        self._calls.gone(gone)
        self._views.forget(Holder(gone.name, gone.incarnation))

    def _connect(self, peer: Peer, address: Address) -> Channel:
        peer.is_local = address.scheme != "tcp"
        return self._network.connect(
            address, lambda frames: self._answered(peer, frames), identity=self._identity
        )

    # -- waiting --------------------------------------------------------------------------------

    def wait_for(self, reply: Reply[Any], timeout_s: float | None) -> None:
        """Return when a reply has ended, or after `timeout_s`; reads the sockets meanwhile if nobody does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        blocks = threading.get_ident() == self._callee.main_ident()
        if blocks:
            self._wait = Wait(callee=reply.call[0], call_id=reply.call[1])
        is_reader = self.watch.enter()
        try:
            self._wait_until(reply, deadline, blocks=blocks, is_reader=is_reader)
        finally:
            self.watch.leave(was_reader=is_reader)
            if blocks:
                self._wait = None

    def cancelled(self, reply: Reply[Any]) -> None:
        """Tell the callee that nobody waits any more; any thread."""
        with self._lock:
            self._calls.cancel(*reply.call)
        self._settle()
        self.watch.wake_reader()

    def _wait_until(
        self, reply: Reply[Any], deadline: float | None, *, blocks: bool, is_reader: bool
    ) -> None:
        probe_at = time.monotonic() + PROBE_AFTER_S if blocks else math.inf
        while not reply.done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            if now >= probe_at:
                self._probe()
                probe_at = now + PROBE_AGAIN_S
            until = min(probe_at, math.inf if deadline is None else deadline)
            self._rest(reply, None if until == math.inf else until - now, is_reader=is_reader)

    def _rest(self, reply: Reply[Any], timeout_s: float | None, *, is_reader: bool) -> None:
        if is_reader:
            self.watch.rest(timeout_s)
        else:
            futures.wait((reply,), timeout_s)

    def _probe(self) -> None:
        if (wait := self._wait) is not None:
            with self._lock:
                self._calls.send_record(self._calls.peer(wait.callee), cycles.begin(self._holder, wait))

    def _probed(self, peer: bytes, probe: Probe) -> None:
        wait = self._wait
        is_open = self._callee.is_open(peer, probe.call_id)
        match cycles.follow(probe, self._holder, wait, is_open=is_open), wait:
            case cycles.Circle(chain), Wait():
                self._calls.fail(wait.callee, wait.call_id, DeadlockError(chain))
            case Probe() as onward, Wait():
                self._calls.send_record(self._calls.peer(wait.callee), onward)

    # -- what is heard; with the lock held --------------------------------------------------------

    def _heard(self, peer: bytes, frames: Frames) -> None:
        record = self._decode(frames)
        match record:
            case Call():
                self._called(peer, record, frames)
            case Cancel():
                self._callee.cancel(peer, record.id)
            case Query():
                self._queried(peer, record)
            case Probe():
                self._probed(peer, record)
            case Unmapped():
                self._pool.release(record.segments, peer.decode(errors="replace"))
            case Carried():
                if (message := self.lines.receive(peer, record, frames[1:])) is not None:
                    self.run_soon(self._on_record, peer, *message)
            case None:
                return
            case _:
                self.run_soon(self._on_record, peer, record, frames[1:])

    def _heard_early(self, news: socket.socket) -> None:
        """Take a death notice, for the calls in hand; the rest is done when it comes over the line."""
        try:
            frame = news.recv(EARLY_BYTES)
        except BlockingIOError:
            return
        if not frame:
            self._hub.remove_reader(news.fileno())
            self._news.remove(news)
            news.close()
        elif isinstance(record := self._decode([frame]), Dying) and self._calls.knows(record.name):
            self._dying(record)

    def _heard_remote(self, peer: bytes, frames: Frames) -> None:
        assert self._remote_listener is not None  # noqa: S101 - it is who hears
        self._routes[peer] = self._remote_listener
        self._heard(peer, frames)

    def _called(self, peer: bytes, call: Call, frames: Frames) -> None:
        try:
            payload = self._payload(call, frames)
        except CodecError:
            self.refused["malformed"] += 1
            return
        inline_bytes = len(call.body) or sum(map(len, frames[1:]))
        incoming = Incoming(call, payload, peer, time.monotonic() + call.budget_s, inline_bytes)
        if call.run_id != self._run_id:
            self._reject(incoming, DeadReason.RUN, f"it belongs to run {call.run_id}, not {self._run_id}")
        elif call.to_incarnation != self._holder.incarnation:
            detail = f"it is for incarnation {call.to_incarnation}, this is {self._holder.incarnation}"
            self._reject(incoming, DeadReason.STALE, detail)
        elif not self._callee.take(incoming):
            self._reject(incoming, DeadReason.FULL, "its mailbox is full")
            self._outbox.say(peer, Credit(messages=1, bytes=inline_bytes))

    def _reject(self, incoming: Incoming, reason: DeadReason, detail: str) -> None:
        self.dead_letters.add(reason, incoming.call, detail)
        kind = "full" if reason is DeadReason.FULL else "refused"
        self.refuse(incoming, Failed(id=incoming.call.id, kind=kind, message=detail))

    def _queried(self, peer: bytes, query: Query) -> None:
        try:
            payload = self._stage_for(peer, self._callee.answer(query.what))
        except KeyError:
            self.say(peer, Failed(id=query.id, kind="refused", message=f"there is no query {query.what!r}"))
        else:
            self.say(peer, Result(id=query.id, body=payload.body, bulk=payload.refs), payload)

    def _heard_head(self, frames: Frames) -> None:
        record, frames = self._decode(frames), frames[1:]
        if isinstance(record, Carried) and self._head_line is not None:
            record, frames = self._head_line.receive(record, frames) or (None, frames)
        if isinstance(record, PeerUp):
            self._up(record)
        elif isinstance(record, Dying):
            self._dying(record)
        elif isinstance(record, PeerGone):
            self._gone(record)
        if record is not None:
            self.run_soon(self._on_record, b"", record, frames)

    def _answered(self, peer: Peer, frames: Frames) -> None:
        record = self._decode(frames)
        match record:
            case Result():
                self._returned(peer, record, frames)
            case Failed():
                if not self._calls.answered(peer, record, ()):
                    self.refused["late answer"] += 1
            case Credit():
                self._calls.credited(peer, record)
            case Unmapped():
                self._pool.release(record.segments, peer.holder)

    def _returned(self, peer: Peer, result: Result, frames: Frames) -> None:
        try:
            answer: Result | Failed = result
            payload = self._payload(result, frames)
        except CodecError as error:
            answer, payload = Failed(id=result.id, kind="unserializable", message=str(error)), ()
        if not self._calls.answered(peer, answer, payload):
            self.refused["late answer"] += 1

    def _payload(self, record: Call | Result, frames: Frames) -> Frames:
        if record.body:
            return (record.body,)
        return self._views.merge(frames[1:], record.bulk) if record.bulk else frames[1:]

    def _decode(self, frames: Frames) -> AnyRecord | None:
        try:
            return wire.decode(frames[0])
        except CodecError:
            self.refused["malformed"] += 1
            return None

    # -- callers are told; without the lock -------------------------------------------------------

    def _settle(self) -> None:
        ended = self._calls.ended
        if not ended:
            return
        while ended:
            try:
                each = ended.popleft()
            except IndexError:  # another thread was quicker
                break
            if each.pending.wants_reply:
                _conclude(each)
            elif each.error is not None:
                self.refused["tell failed"] += 1
        self.watch.wake_reader()
        self._callee.reply_ended()

    # -- the I/O thread's own time ----------------------------------------------------------------

    def _expire_soon(self) -> None:
        self.run_soon(self._expire)

    def _expire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            first = self._calls.expire(time.monotonic())
        if first is not None:
            self._timer = self.loop.call_at(first, self._expire)
        self._settle()

    def _flush_later(self, peer: Peer) -> None:
        if not peer.is_retrying:
            peer.is_retrying = True
            self.run_soon(self.loop.call_later, RETRY_FULL_S, self._flush, peer)

    def _flush(self, peer: Peer) -> None:
        with self._lock:
            peer.is_retrying = False
            self._calls.flush(peer)
        self._settle()

    def _flush_outbox_later(self) -> None:
        self.run_soon(self.loop.call_later, RETRY_FULL_S, self._flush_outbox)

    def _flush_outbox(self) -> None:
        with self._lock:
            self._outbox.flush()

    def _released_one(self, segment: str) -> None:
        """Note that a view of another's segment is gone; runs inside of whatever drops it."""
        self._released.append(segment)
        self._wake_loop(self._tell_released)

    def _tell_released(self) -> None:
        by_owner: dict[Holder, list[str]] = {}
        with self._lock:
            while self._released:
                segment = self._released.popleft()
                name = parse_name(segment)
                by_owner.setdefault(Holder(name.owner, name.incarnation), []).append(segment)
            for owner, segments in by_owner.items():
                self._tell_owner(owner, Unmapped(segments=tuple(segments)))

    def _tell_owner(self, owner: Holder, record: Unmapped) -> None:
        peer = self._calls.peer(owner.name)
        if peer.incarnation == owner.incarnation:
            self._calls.send_record(peer, record)
        else:
            self._outbox.say(str(owner).encode(), record)

    def _wake_loop(self, action: Callable[[], object]) -> None:
        try:
            self.loop.call_soon_threadsafe(action)
        except (RuntimeError, AttributeError):  # closed, or not yet there: the process ends or begins
            return


def _conclude(ended: Ended) -> None:
    reply = ended.pending.reply
    error, value = ended.error, None
    if isinstance(ended.answer, Failed):
        error = failure.rebuild(ended.pending.name, ended.answer)
    elif error is None:
        error, value = _unpack_result(ended.frames, ended.pending.returns)
    reply.end(value, error)


def _unpack_result(frames: Frames, returns: Any) -> tuple[SerializationError | None, Any]:
    try:
        return None, convert(codec.unpack(frames), returns)
    except (CodecError, msgspec.ValidationError) as error:
        return SerializationError(f"the result is not what was promised: {error}"), None
