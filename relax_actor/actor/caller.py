"""The calls that this process makes: packed, sent, answered, and their callers told.

The shell round `calls`, which decides. Calls that ended are collected while the hub's lock is held, and their
replies ended by `settle` when it is free, so that no user code runs with it.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from relax_actor.actor import failure
from relax_actor.actor.base import EndpointOptions
from relax_actor.actor.bulk import NOTHING, BulkPool, BulkViews, Staged
from relax_actor.actor.callee import Callee
from relax_actor.actor.calls import Calls
from relax_actor.actor.convert import convert, signature_of
from relax_actor.actor.io_thread import IoThread
from relax_actor.actor.peer import Ended, Peer, Pending
from relax_actor.actor.ref import Reply
from relax_actor.actor.sockets import Sockets
from relax_actor.actor.waits import Waits
from relax_actor.actor.wire import AnyRecord, Credit, Dying, Failed, PeerGone, PeerUp, Result, Unmapped
from relax_actor.errors import SerializationError
from relax_actor.ids import Holder
from transport import codec
from transport.address import Address
from transport.control import Channel, Frames
from transport.errors import CodecError
from transport.zmq_hub import Hub

RETRY_FULL_S: Final = 0.001
"""How soon a send that met a full channel is tried again."""

LATE_REPLY_S: Final = 0.25
"""How long a dying actor's last replies may still be read for; when it is gone, what is not here is lost."""


class Caller:
    """The `Sender` of every ref of this process.

    Args:
        holder: who calls.
        run_id: of every call.
        hub: whose lock is held to send.
        sockets: what calls leave by.
        thread: for deadlines, and sends that met a full channel.
        pool: where large arguments are.
        views: where large results are.
        callee: is told when a call that this process made has ended.
        refused: counts what was not carried out, by reason.
        decode: reads a record, or counts it as malformed.
    """

    def __init__(
        self,
        holder: Holder,
        run_id: str,
        *,
        hub: Hub,
        sockets: Sockets,
        thread: IoThread,
        pool: BulkPool,
        views: BulkViews,
        callee: Callee,
        refused: Counter[str],
        decode: Callable[[Frames], AnyRecord | None],
    ) -> None:
        self._hub, self._lock, self._sockets, self._thread = hub, hub.lock, sockets, thread
        self._pool, self._views, self._callee = pool, views, callee
        self._refused, self._decode = refused, decode
        self._ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self.calls = Calls(holder, run_id, pool, self._flush_later, self._expire_soon)
        self.waits = Waits(holder, hub, callee, self.calls, self.settle)

    # -- out ------------------------------------------------------------------------------------

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, writable: bool) -> Staged:
        """Make arguments ready to be sent; see `Ref.pack`."""
        try:
            if not kwargs and all(map(codec.is_scalar, args)):
                return self._pool.stage((codec.pack_scalars((args, kwargs)),), writable=writable)
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

    def incarnation_of(self, name: str) -> int | None:
        """Return the incarnation that takes calls now, if any."""
        peer = self.calls.peer(name)
        return None if peer.dying else peer.incarnation

    def _submit(self, pending: Pending, *, only_now: bool = False) -> Reply[Any]:
        with self._lock:
            pending.id = next(self._ids)  # here: the calls to one actor are numbered as they are sent
            pending.reply.call, pending.reply.waiter = (pending.name, pending.id), self.waits
            self.calls.submit(pending, only_now=only_now)
        if self.calls.ended:
            self.settle()
        return pending.reply

    # -- who is there; with the lock held --------------------------------------------------------

    def rename(self, holder: Holder) -> None:
        """Call as somebody else from now on."""
        self.calls.rename(holder)
        self.waits.holder = holder

    def up(self, up: PeerUp) -> None:
        """Send calls for this actor to this incarnation from now on."""
        self.calls.up(up, lambda peer: self._connect(peer, Address.parse(up.address)))

    def dying(self, dying: Dying) -> None:
        """Fail at once what will have no answer, the rest when a reply had time to arrive."""
        if self.calls.dying(dying):
            self._thread.run_soon(self._thread.loop.call_later, LATE_REPLY_S, self._forget, dying)

    def gone(self, gone: PeerGone) -> None:
        """Fail or keep the calls that were with this incarnation."""
        self.calls.gone(gone)
        self._views.forget(Holder(gone.name, gone.incarnation))

    def _connect(self, peer: Peer, address: Address) -> Channel:
        peer.is_local = address.scheme != "tcp"
        return self._sockets.connect(address, partial(self._answered, peer))

    def _forget(self, dying: Dying) -> None:
        self._hub.catch_up()
        with self._lock:
            self.calls.forget(dying)
        self.settle()

    # -- back; with the lock held ----------------------------------------------------------------

    def _answered(self, peer: Peer, frames: Frames) -> None:
        match record := self._decode(frames):
            case Result():
                self._returned(peer, record, frames)
            case Failed():
                self._end(peer, record, ())
            case Credit():
                self.calls.credited(peer, record)
            case Unmapped():
                self._pool.release(record.segments, peer.holder)

    def _returned(self, peer: Peer, result: Result, frames: Frames) -> None:
        try:
            self._end(peer, result, self._views.payload(result, frames))
        except CodecError as error:
            self._end(peer, Failed(id=result.id, kind="unserializable", message=str(error)), ())

    def _end(self, peer: Peer, answer: Result | Failed, payload: Frames) -> None:
        if not self.calls.answered(peer, answer, payload):
            self._refused["late answer"] += 1

    # -- callers are told; without the lock -------------------------------------------------------

    def settle(self) -> None:
        """Tell callers whose calls ended; any thread."""
        ended = self.calls.ended
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
                self._refused["tell failed"] += 1
        self.waits.watch.wake_reader()
        self._callee.reply_ended()

    # -- the I/O thread's own time ----------------------------------------------------------------

    def _expire_soon(self) -> None:
        self._thread.run_soon(self._expire)

    def _expire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            first = self.calls.expire(time.monotonic())
        if first is not None:
            self._timer = self._thread.loop.call_at(first, self._expire)
        self.settle()

    def _flush_later(self, peer: Peer) -> None:
        if not peer.is_retrying:
            peer.is_retrying = True
            self._thread.run_soon(self._thread.loop.call_later, RETRY_FULL_S, self._flush, peer)

    def _flush(self, peer: Peer) -> None:
        with self._lock:
            peer.is_retrying = False
            self.calls.flush(peer)
        self.settle()


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
