"""The thread that carries a process' messages: calls out, calls in, and the control line to the head.

Design. One thread runs an event loop with the process' ZeroMQ sockets; user code never touches a socket.
A call is packed in the caller's thread, handed to the loop, and sent to the incarnation that is up; while
none is up it waits, within its deadline. The head tells which incarnation is up or gone.

Invariants: a call ends exactly once, by result, error, death notice or the caller's own deadline, whatever
the callee does; calls of one sender to one actor keep their order; a call that was handed to a dead
incarnation is sent again only if its endpoint is idempotent.
"""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from relax_actor.actor import failure, page, wire
from relax_actor.actor.base import EndpointOptions
from relax_actor.actor.convert import convert, signature_of
from relax_actor.actor.lines import HeadLine, Lines
from relax_actor.actor.ref import Reply
from relax_actor.actor.wire import AnyRecord, Call, Carried, Dying, Failed, PeerGone, PeerUp, Record, Result
from relax_actor.errors import (
    ActorDied,
    ActorError,
    ActorRestarted,
    CallTimeout,
    Executed,
    MailboxFull,
    SerializationError,
)
from relax_actor.ids import Holder
from transport import codec
from transport.address import Address
from transport.control import Channel, Frames, Listener
from transport.errors import ChannelClosed, ChannelFull, CodecError, PeerUnreachable
from transport.security import CurveKeys
from transport.zmq_control import ZmqNetwork

RETRY_FULL_S = 0.001
"""How soon a send that met a full channel is tried again."""

LATE_REPLY_S = 0.02
"""How long a dead actor's last replies may still be read for."""

MAX_WAITING_CALLS = 4096
"""Calls to one actor that may wait for it to come up or to drain."""


class Incoming(msgspec.Struct):
    """A call as it came in, not yet unpacked."""

    call: Call
    frames: Frames
    peer: bytes
    expires: float  # monotonic seconds of this process


class _Pending(msgspec.Struct, weakref=True, eq=False):
    id: int
    name: str
    method: str
    frames: Frames
    deadline: float
    timeout_s: float
    idempotent: bool
    pinned: int | None
    reply: Reply[Any]
    returns: Any
    wants_reply: bool
    timer: asyncio.TimerHandle | None = None
    sent_to: int | None = None  # incarnation


class _Peer:
    """What this process knows of another actor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dying: Dying | None = None  # nothing more is sent; a reply may still be on its way
        self.last_dead = 0  # incarnation
        self.incarnation: int | None = None
        self.channel: Channel | None = None
        self.waiting: deque[_Pending] = deque()
        self.in_flight: dict[int, _Pending] = {}
        self.retrying = False


class Courier:
    """Owns the process' sockets and its event loop thread.

    Args:
        holder: who this process is.
        run_id: refuses calls of other runs.
        address: where to bind.
        head: the head's address; None in the head itself.
        on_call: takes a call off the wire; loop thread; False when the mailbox is full.
        on_record: takes any other record; loop thread.
        on_reply: told after a reply ended, so that a waiting `step` can look; loop thread.
        on_start: told before the sockets are bound; loop thread.
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
        on_call: Callable[[Incoming], bool] = lambda _incoming: False,
        on_record: Callable[[bytes, Record, Frames], None] = lambda _peer, _record, _frames: None,
        on_reply: Callable[[], None] = lambda: None,
        on_start: Callable[[], None] = lambda: None,
        remote: Address | None = None,
        keys: CurveKeys | None = None,
        head_line: HeadLine | None = None,
    ) -> None:
        self._holder, self._run_id = holder, run_id
        self._key, self._on_start = page.sender_key(holder.name, holder.incarnation), on_start
        self._address, self._head_address = address, head
        self._on_call, self._on_record, self._on_reply = on_call, on_record, on_reply
        self._peers: dict[str, _Peer] = {}
        self._ids = itertools.count(1)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._outbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._drain_is_due = False
        self._listener: Listener
        self._remote, self._keys, self._head_line = remote, keys, head_line
        self.lines = Lines(self.send)
        self._remote_listener: Listener | None = None
        self._routes: dict[bytes, Listener] = {}  # of peers on other hosts
        self._head: Channel | None = None
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self.refused: dict[str, int] = {}

    # -- lifetime -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and return once the sockets are bound."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Flush what the sockets take, close them and end the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def run_soon(self, action: Callable[..., object], *args: Any) -> None:
        """Run `action` in the loop thread, in the order of the calls; a stopped courier drops it.

        The loop is woken once for all that is handed over before it looks.
        """
        self._outbox.append((action, args))
        if not self._drain_is_due:
            self._drain_is_due = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: the process is ending
                return

    def _drain(self) -> None:
        self._drain_is_due = False  # before looking: what comes after this wakes the loop again
        for _ in range(len(self._outbox)):
            action, args = self._outbox.popleft()
            try:
                action(*args)
            except Exception as error:  # noqa: BLE001 - one message's failure is not the thread's
                self.loop.call_exception_handler({"message": f"{action!r} failed", "exception": error})

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            try:
                network = runner.run(self._open())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that called start
                self._failure = error
                self._started.set()
                return
            self._started.set()
            try:
                self.loop.run_forever()
            finally:
                network.close()

    async def _open(self) -> ZmqNetwork:
        self._on_start()
        network = ZmqNetwork(keys=self._keys)
        self._network = network
        self._listener = network.listen(self._address, self._heard)
        if self._remote is not None:
            self._remote_listener = network.listen(self._remote, self._heard_remote)
        if self._head_address is not None:
            identity = str(self._holder).encode()
            self._head = network.connect(self._head_address, self._heard_head, identity=identity)
            if self._head_line is not None:
                self._head_line.start(self.loop, self._head.send)
        return network

    @property
    def remote_address(self) -> Address | None:
        """Where peers on other hosts reach this process, with the port it got."""
        return self._remote_listener.address if self._remote_listener else None

    # -- speaking -------------------------------------------------------------------------------

    def ask(
        self,
        name: str,
        method: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        timeout_s: float,
        options: EndpointOptions,
        pinned: int | None,
        wants_reply: bool,
    ) -> Reply[Any]:
        """Send a call; any thread. See `Ref.ask`."""
        args, kwargs = arguments
        pending = _Pending(
            id=next(self._ids),
            name=name,
            method=method.__name__,
            frames=_pack([list(args), kwargs]),
            deadline=time.monotonic() + timeout_s,
            timeout_s=timeout_s,
            idempotent=options.idempotent,
            pinned=pinned,
            reply=Reply(),
            returns=signature_of(method).returns,
            wants_reply=wants_reply,
        )
        self.run_soon(self._submit, pending)
        return pending.reply

    def incarnation_of(self, name: str) -> int | None:
        """Return the incarnation that takes calls now, if any."""
        peer = self._peers.get(name)
        return peer.incarnation if peer and not peer.dying else None

    def respond(self, incoming: Incoming, record: Record, frames: Frames = ()) -> None:
        """Answer a call; any thread."""
        if incoming.call.wants_reply:
            self.run_soon(self.say, incoming.peer, record, frames)

    def tell_head(self, record: Record) -> None:
        """Send a record to the head; any thread."""
        self.run_soon(self._send_head, record)

    def rename(self, holder: Holder) -> None:
        """Be somebody else from now on: a spare that was promoted; loop thread."""
        self._holder = holder
        if self._head is not None and self._head_address is not None:
            self._head.close()
            self._head = self._network.connect(
                self._head_address, self._heard_head, identity=str(holder).encode()
            )

    def say(self, peer: bytes, record: Record, frames: Frames = (), tries: int = 1000) -> None:
        """Send a record to whoever connected as `peer`; loop thread. A peer that is gone is not told."""
        if self.lines.say(peer, record, frames):
            return
        try:
            self.send(peer, [codec.encode(record), *frames])
        except ChannelFull:
            if tries:
                self.loop.call_later(RETRY_FULL_S, self.say, peer, record, frames, tries - 1)
        except (PeerUnreachable, ChannelClosed):
            self._routes.pop(peer, None)
            self._count("peer gone")

    def send(self, peer: bytes, frames: Frames) -> None:
        """Send frames to whoever connected as `peer`; loop thread.

        Raises:
            ChannelFull: the peer does not keep up.
            PeerUnreachable: it is not connected.
            ChannelClosed: this process is ending.
        """
        self._routes.get(peer, self._listener).send(peer, frames)

    def _send_head(self, record: Record) -> None:
        if self._head_line is not None:
            self._head_line.say(record)
        elif self._head is not None:
            self._head.send([codec.encode(record)])

    # -- calls out ------------------------------------------------------------------------------

    def _submit(self, pending: _Pending) -> None:
        peer = self._peer(pending.name)
        if len(peer.waiting) >= MAX_WAITING_CALLS:
            error = MailboxFull(f"{len(peer.waiting)} calls already wait for {pending.name}")
            self._end(pending, error)
            return
        pending.timer = self.loop.call_later(
            max(0.0, pending.deadline - time.monotonic()), self._expire, pending
        )
        peer.waiting.append(pending)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        while peer.waiting and peer.incarnation is not None and peer.dying is None:
            pending = peer.waiting[0]
            if pending.reply.done():
                peer.waiting.popleft()
            elif pending.pinned not in (None, peer.incarnation):
                peer.waiting.popleft()
                self._end(pending, ActorRestarted(peer.name, pending.pinned or 0, peer.incarnation))
            elif not self._transmit(peer, pending):
                self._flush_later(peer)
                return
            else:
                peer.waiting.popleft()

    def _flush_later(self, peer: _Peer) -> None:
        if not peer.retrying:
            peer.retrying = True
            self.loop.call_later(RETRY_FULL_S, self._flush_again, peer)

    def _flush_again(self, peer: _Peer) -> None:
        peer.retrying = False
        self._flush(peer)

    def _transmit(self, peer: _Peer, pending: _Pending) -> bool:
        call = Call(
            id=pending.id,
            method=pending.method,
            run_id=self._run_id,
            sender=self._holder.name,
            sender_incarnation=self._holder.incarnation,
            to_incarnation=peer.incarnation or 0,
            budget_s=max(0.0, pending.deadline - time.monotonic()),
            wants_reply=pending.wants_reply,
        )
        try:
            assert peer.channel is not None  # noqa: S101 - set with the incarnation
            peer.channel.send([codec.encode(call), *pending.frames])
        except ChannelFull:
            return False
        except Exception as error:  # noqa: BLE001 - too large, closed: this call's error, not the thread's
            self._end(pending, SerializationError(f"{peer.name}.{pending.method}: {error}"))
            return True
        pending.sent_to = peer.incarnation
        if pending.wants_reply:
            peer.in_flight[pending.id] = pending
        else:
            self._end(pending, None)
        return True

    def _expire(self, pending: _Pending) -> None:
        peer = self._peer(pending.name)
        peer.in_flight.pop(pending.id, None)
        sent = pending.sent_to is not None
        detail = "it was delivered" if sent else f"{pending.name} did not come up"
        executed = Executed.MAYBE if sent else Executed.NO
        self._end(pending, CallTimeout(pending.name, pending.method, pending.timeout_s, executed, detail))

    def _end(self, pending: _Pending, outcome: ActorError | None, value: Any = None) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        if not pending.reply.set_running_or_notify_cancel():
            return  # the caller cancelled: the answer is dropped
        if outcome is not None:
            pending.reply.set_exception(outcome)
        else:
            pending.reply.set_result(value)
        self._on_reply()

    # -- what is heard --------------------------------------------------------------------------

    def _heard(self, peer: bytes, frames: Frames) -> None:
        record = self._decode(frames)
        if isinstance(record, Call):
            self._called(Incoming(record, frames[1:], peer, time.monotonic() + record.budget_s))
        elif isinstance(record, Carried):
            if (message := self.lines.receive(peer, record, frames[1:])) is not None:
                self._on_record(peer, *message)
        elif record is not None:
            self._on_record(peer, record, frames[1:])

    def _heard_remote(self, peer: bytes, frames: Frames) -> None:
        assert self._remote_listener is not None  # noqa: S101 - it is who hears
        self._routes[peer] = self._remote_listener
        self._heard(peer, frames)

    def _called(self, incoming: Incoming) -> None:
        call = incoming.call
        reason = ""
        if call.run_id != self._run_id:
            reason = f"it belongs to run {call.run_id}, this is run {self._run_id}"
        elif call.to_incarnation != self._holder.incarnation:
            reason = f"it is for incarnation {call.to_incarnation}, this is {self._holder.incarnation}"
        if reason:
            self._count("stale")
            self.respond(incoming, Failed(id=call.id, kind="refused", message=reason))
        elif not self._on_call(incoming):
            self._count("full")
            self.respond(incoming, Failed(id=call.id, kind="full", message="its mailbox is full"))

    def _heard_head(self, frames: Frames) -> None:
        record, frames = self._decode(frames), frames[1:]
        if isinstance(record, Carried) and self._head_line is not None:
            record, frames = self._head_line.receive(record, frames) or (None, frames)
        if isinstance(record, PeerUp):
            self.peer_up(record)
        elif isinstance(record, Dying):
            self.peer_dying(record)
        elif isinstance(record, PeerGone):
            self.peer_gone(record)
        if record is not None:
            self._on_record(b"", record, frames)

    def peer_up(self, up: PeerUp) -> None:
        """Send calls for this actor to this incarnation from now on; loop thread."""
        peer = self._peer(up.name)
        if up.incarnation <= max(peer.incarnation or 0, peer.last_dead):
            return
        self._disconnect(peer, "it was restarted")
        peer.incarnation = up.incarnation
        peer.channel = self._network.connect(
            Address.parse(up.address),
            lambda frames: self._answered(peer, frames),
            identity=str(self._holder).encode(),
        )
        self._flush(peer)

    def peer_dying(self, dying: Dying) -> None:
        """Fail at once what will have no answer, the rest when a reply had time to arrive; loop thread."""
        peer = self._peer(dying.name)
        if peer.incarnation != dying.incarnation or peer.dying is not None:
            return
        peer.dying = dying
        for pending in list(peer.in_flight.values()):
            is_running = (dying.running_sender, dying.running_id) == (self._key, pending.id)
            if not pending.idempotent and (is_running or self._executed(peer, pending) is Executed.NO):
                del peer.in_flight[pending.id]
                self._die(peer, pending, dying.reason)
        self.loop.call_later(LATE_REPLY_S, self._forget, peer, dying)

    def _forget(self, peer: _Peer, dying: Dying) -> None:
        if peer.dying is dying:
            self._disconnect(peer, dying.reason)

    def peer_gone(self, gone: PeerGone) -> None:
        """Fail or keep the calls that were with this incarnation; loop thread."""
        peer = self._peer(gone.name)
        if peer.incarnation == gone.incarnation:
            self._disconnect(peer, gone.reason)

    def _disconnect(self, peer: _Peer, reason: str) -> None:
        if peer.channel is None or peer.incarnation is None:
            return
        peer.channel.close()
        lost, incarnation = list(peer.in_flight.values()), peer.incarnation
        peer.channel, peer.incarnation, peer.last_dead = None, None, incarnation
        peer.in_flight.clear()
        for pending in reversed(lost):
            if pending.idempotent and pending.pinned is None:
                peer.waiting.appendleft(pending)
            else:
                self._die(peer, pending, reason)
        peer.dying = None

    def _die(self, peer: _Peer, pending: _Pending, reason: str) -> None:
        executed = self._executed(peer, pending)
        self._end(pending, ActorDied(peer.name, pending.sent_to or 0, reason, executed))

    def _executed(self, peer: _Peer, pending: _Pending) -> Executed:
        return page.executed(peer.dying, self._key, pending.id) if peer.dying else Executed.MAYBE

    def _answered(self, peer: _Peer, frames: Frames) -> None:
        record = self._decode(frames)
        if not isinstance(record, Result | Failed):
            return
        pending = peer.in_flight.pop(record.id, None)
        if pending is None:
            self._count("late answer")
        elif isinstance(record, Failed):
            self._end(pending, failure.rebuild(peer.name, record))
        else:
            self._end(pending, *_unpack_result(frames[1:], pending.returns))

    def _decode(self, frames: Frames) -> AnyRecord | None:
        try:
            return wire.decode(frames[0]) if frames else None
        except CodecError:
            self._count("malformed")
            return None

    def _peer(self, name: str) -> _Peer:
        return self._peers.setdefault(name, _Peer(name))

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


def _pack(value: Any) -> Frames:
    try:
        return codec.pack(value)
    except CodecError as error:
        raise SerializationError(str(error)) from error


def _unpack_result(frames: Frames, returns: Any) -> tuple[ActorError | None, Any]:
    try:
        return None, convert(codec.unpack(frames), returns)
    except (CodecError, msgspec.ValidationError) as error:
        return SerializationError(f"the result is not what was promised: {error}"), None
