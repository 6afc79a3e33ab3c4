"""The calls a process makes: who waits for whom, who has credit, what is in flight.

Everything here runs with the courier's lock held, in any thread, and never waits. A call that ends is put
into `ended`, for the courier to tell its caller once the lock is free.

Invariants: a call ends exactly once; calls of one sender to one actor keep their order, also where they wait
for credit or are sent again to the next incarnation; a dead actor's calls end or wait for the next one.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from relax_actor.actor import page
from relax_actor.actor.bulk import BulkPool
from relax_actor.actor.deadlines import Deadlines
from relax_actor.actor.peer import Ended, Peer, Pending
from relax_actor.actor.wire import (
    Cancel,
    Credit,
    Dying,
    Failed,
    PeerGone,
    PeerUp,
    Query,
    Record,
    Result,
)
from relax_actor.errors import (
    ActorDied,
    ActorError,
    ActorRestarted,
    Executed,
    MailboxFull,
    SerializationError,
)
from relax_actor.ids import Holder
from transport import codec
from transport.control import Channel, Frames
from transport.errors import ChannelFull

MAX_WAITING_CALLS: Final = 4096
"""Calls to one actor that may wait for it to come up, or for credit."""


class Calls:
    """All calls of one process.

    Args:
        holder: who calls.
        run_id: of every call.
        pool: where large frames are.
        flush_later: arranges that `flush` is called for a peer whose channel is full.
        new_first_deadline: told that `expire` is due earlier than it was.
    """

    def __init__(
        self,
        holder: Holder,
        run_id: str,
        pool: BulkPool,
        flush_later: Callable[[Peer], None],
        new_first_deadline: Callable[[], None],
    ) -> None:
        self._holder, self._run_id, self._pool = holder, run_id, pool
        self._key = page.sender_key(holder.name, holder.incarnation)
        self._flush_later, self._new_first_deadline = flush_later, new_first_deadline
        self._peers: dict[str, Peer] = {}
        self._deadlines: Deadlines[Pending] = Deadlines()
        self.ended: deque[Ended] = deque()
        self._end_reason = ""

    def rename(self, holder: Holder) -> None:
        """Call as somebody else from now on."""
        self._holder, self._key = holder, page.sender_key(holder.name, holder.incarnation)

    def peer(self, name: str) -> Peer:
        """Return what is known of an actor."""
        found = self._peers.get(name)
        if found is None:
            found = self._peers[name] = Peer(name)
        return found

    def knows(self, name: str) -> bool:
        """Whether this actor was ever called, or is up."""
        return name in self._peers

    def find(self, name: str, call_id: int) -> Pending | None:
        """Return a call that has not ended."""
        peer = self.peer(name)
        if (pending := peer.in_flight.get(call_id)) is not None:
            return pending
        return next((each for each in peer.waiting if each.id == call_id), None)

    # -- out ------------------------------------------------------------------------------------

    def submit(self, pending: Pending, *, only_now: bool = False) -> None:
        """Send a call, or let it wait for its turn within its deadline.

        Raises:
            MailboxFull: a message without reply that finds no room; an ask's reply says so instead.
        """
        peer = self.peer(pending.name)
        if self._end_reason:
            error = ActorDied(peer.name, peer.incarnation or 0, self._end_reason, Executed.NO)
            self.ended.append(Ended(pending, error))
            return
        full = len(peer.waiting) >= MAX_WAITING_CALLS
        if full or (only_now and (peer.waiting or not peer.has_credit(pending.payload.inline_bytes))):
            self._refuse(peer, pending)
            return
        if self._deadlines.add(pending, pending.deadline):
            self._new_first_deadline()
        if pending.query:  # overtakes: it takes no credit
            if not self._try_to_send(peer, pending):
                peer.waiting.appendleft(pending)
        elif peer.waiting or not self._try_to_send(peer, pending):
            peer.waiting.append(pending)

    def flush(self, peer: Peer) -> None:
        """Send what waits, as far as credit and channel allow."""
        while peer.waiting:
            if not self._try_to_send(peer, peer.waiting[0]):
                return
            peer.waiting.popleft()

    def cancel(self, name: str, call_id: int) -> None:
        """Forget a call whose caller does not want the answer any more, and tell the callee."""
        peer = self.peer(name)
        pending = self.find(name, call_id)
        if pending is None:
            return
        if peer.in_flight.pop(call_id, None) is not None:
            self.send_record(peer, Cancel(id=call_id))
        else:
            peer.waiting.remove(pending)
        self.end(pending)

    def fail(self, name: str, call_id: int, error: ActorError) -> None:
        """End a call that is in flight with an error of our own."""
        pending = self.peer(name).in_flight.pop(call_id, None)
        if pending is not None:
            self.end(pending, error)

    def status(self) -> dict[str, dict[str, int]]:
        """Return for every actor ever called: calls in flight, calls that wait, credit left."""
        return {name: peer.status() for name, peer in self._peers.items()}

    def send_record(self, peer: Peer, record: Record) -> None:
        """Send a control record, which takes no credit; where nobody is up, nobody has to know it."""
        if peer.channel is not None:
            try:
                peer.channel.send([codec.encode(record)])
            except ChannelFull:  # best effort: it only ends earlier what ends anyway
                return

    def _refuse(self, peer: Peer, pending: Pending) -> None:
        waiting = f"{len(peer.waiting)} calls already wait" if peer.waiting else "its mailbox has no room"
        error = MailboxFull(f"{peer.name}.{pending.method}: {waiting}")
        pending.payload.release()
        if not pending.wants_reply:
            raise error
        self.ended.append(Ended(pending, error))

    def _try_to_send(self, peer: Peer, pending: Pending) -> bool:
        """Return whether the call does not wait any more: it was sent, or has ended."""
        if peer.channel is None or peer.incarnation is None or peer.dying is not None:
            return False
        if pending.reply.done():
            self.end(pending)
        elif pending.pinned not in (None, peer.incarnation):
            self.end(pending, ActorRestarted(peer.name, pending.pinned or 0, peer.incarnation))
        elif pending.query:
            return self._transmit(peer, pending, Query(id=pending.id, what=pending.query))
        elif not peer.has_credit(pending.payload.inline_bytes):
            return False
        else:
            if not peer.is_local:
                pending.payload = pending.payload.without_shared_memory()
            call = pending.record(self._holder, self._run_id, peer.incarnation, is_local=peer.is_local)
            return self._transmit(peer, pending, call)
        return True

    def _transmit(self, peer: Peer, pending: Pending, record: Record) -> bool:
        try:
            assert peer.channel is not None  # noqa: S101 - looked at by the caller
            peer.channel.send([codec.encode(record), *pending.payload.frames])
        except ChannelFull:
            self._flush_later(peer)
            return False
        except Exception as error:  # noqa: BLE001 - too large, closed: this call's error, not the thread's
            self.end(pending, SerializationError(f"{peer.name}.{pending.method}: {error}"))
            return True
        self._sent(peer, pending)
        return True

    def _sent(self, peer: Peer, pending: Pending) -> None:
        if pending.payload.pool is not None:
            pending.payload.sent_to(peer.holder)
        pending.sent_to = peer.incarnation
        if not pending.query:
            peer.messages -= 1
            peer.unread_bytes += pending.payload.inline_bytes
        if pending.wants_reply:
            peer.in_flight[pending.id] = pending
        else:
            self.end(pending)

    # -- back -----------------------------------------------------------------------------------

    def answered(self, peer: Peer, answer: Result | Failed, frames: Frames) -> bool:
        """End the call that this answers; False where it has ended before."""
        pending = peer.in_flight.pop(answer.id, None)
        if pending is None:
            return False
        self.end(pending, answer=answer, frames=frames)
        return True

    def credited(self, peer: Peer, credit: Credit) -> None:
        """Send what waited for credit."""
        peer.credit(credit)
        self.flush(peer)

    def up(self, up: PeerUp, connect: Callable[[Peer], Channel]) -> None:
        """Send calls for this actor to this incarnation from now on."""
        peer = self.peer(up.name)
        if up.incarnation <= max(peer.incarnation or 0, peer.last_dead):
            return
        self._disconnect(peer, "it was restarted")
        peer.incarnation, peer.channel = up.incarnation, connect(peer)
        peer.new_credit()
        self.flush(peer)

    def dying(self, dying: Dying) -> bool:
        """Fail at once what will have no answer; return whether `forget` is due when a reply had its time."""
        peer = self.peer(dying.name)
        if peer.incarnation != dying.incarnation or peer.dying is not None:
            return False
        peer.dying = dying
        for pending in list(peer.in_flight.values()):
            is_running = (dying.running_sender, dying.running_id) == (self._key, pending.id)
            if not pending.idempotent and (is_running or self._executed(peer, pending) is Executed.NO):
                del peer.in_flight[pending.id]
                self._die(peer, pending, dying.reason)
        return True

    def forget(self, dying: Dying) -> None:
        """Fail or keep the calls that were with it; a reply would have come by now."""
        peer = self.peer(dying.name)
        if peer.dying is dying:
            self._disconnect(peer, dying.reason)

    def gone(self, gone: PeerGone) -> None:
        """Fail or keep the calls that were with this incarnation."""
        self._pool.forget(f"{gone.name}#{gone.incarnation}")
        peer = self.peer(gone.name)
        if peer.incarnation == gone.incarnation:
            self._disconnect(peer, gone.reason)

    def _disconnect(self, peer: Peer, reason: str) -> None:
        if peer.channel is None or peer.incarnation is None:
            return
        peer.channel.close()
        lost, incarnation = list(peer.in_flight.values()), peer.incarnation
        peer.channel, peer.incarnation, peer.last_dead = None, None, incarnation
        peer.in_flight.clear()
        for pending in reversed(lost):  # before those that waited: they were asked for earlier
            if pending.idempotent and pending.pinned is None:
                peer.waiting.appendleft(pending)
            else:
                self._die(peer, pending, reason)
        peer.dying = None

    def _die(self, peer: Peer, pending: Pending, reason: str) -> None:
        executed = self._executed(peer, pending)
        self.end(pending, ActorDied(peer.name, pending.sent_to or 0, reason, executed))

    def _executed(self, peer: Peer, pending: Pending) -> Executed:
        return page.executed(peer.dying, self._key, pending.id) if peer.dying else Executed.MAYBE

    # -- the end of a call ----------------------------------------------------------------------

    def expire(self, now: float) -> float | None:
        """End the calls whose deadline has passed; return when to look again, if anything waits."""
        for pending in self._deadlines.pop_passed(now):
            peer = self.peer(pending.name)
            if peer.in_flight.pop(pending.id, None) is None:
                peer.waiting.remove(pending)
            self.end(pending, pending.timeout(is_up=peer.channel is not None))
        return self._deadlines.first()

    def end_all(self, reason: str) -> None:
        """End every call, and those to come: nobody will read an answer any more."""
        self._end_reason = reason
        for peer in self._peers.values():
            waiting, peer.waiting = list(peer.waiting), deque()
            for pending in waiting:
                self.end(pending, ActorDied(peer.name, peer.incarnation or 0, reason, Executed.NO))
            lost, peer.in_flight = list(peer.in_flight.values()), {}
            for pending in lost:
                self.end(pending, ActorDied(peer.name, peer.incarnation or 0, reason, Executed.MAYBE))

    def end(
        self,
        pending: Pending,
        error: ActorError | None = None,
        answer: Result | Failed | None = None,
        frames: Frames = (),
    ) -> None:
        """Note how a call ended; it must be in no other table any more."""
        self._deadlines.remove(pending, pending.deadline)
        if pending.payload.pool is not None:
            pending.payload.release()
        self.ended.append(Ended(pending, error, answer, frames))
