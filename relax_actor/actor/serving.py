"""The calls that others make to this process: taken or refused, and answered."""

import time
from collections import Counter
from typing import Any

from relax_actor.actor.bulk import BulkPool, BulkViews, Staged
from relax_actor.actor.callee import Callee
from relax_actor.actor.mailbox import DeadLetters, DeadReason, Incoming
from relax_actor.actor.outbox import Outbox
from relax_actor.actor.releases import Releases
from relax_actor.actor.sockets import Sockets
from relax_actor.actor.wire import Call, Credit, Failed, Query, Result
from relax_actor.ids import Holder
from transport import codec
from transport.control import Frames
from transport.errors import CodecError
from transport.zmq_hub import Hub


class Serving:
    """Between the sockets and the mailbox.

    Args:
        holder: who is called.
        run_id: refuses calls of other runs.
        hub: whose lock is held to send.
        sockets: who of the callers is on another host.
        outbox: what answers leave by.
        pool: where large results are.
        views: where large arguments are.
        releases: tells owners of segments that are free again.
        callee: who takes calls.
        refused: counts what was not carried out, by reason.
    """

    def __init__(
        self,
        holder: Holder,
        run_id: str,
        *,
        hub: Hub,
        sockets: Sockets,
        outbox: Outbox,
        pool: BulkPool,
        views: BulkViews,
        releases: Releases,
        callee: Callee,
        refused: Counter[str],
    ) -> None:
        self.holder, self._run_id, self._lock, self._sockets = holder, run_id, hub.lock, sockets
        self._outbox, self._pool, self._views, self._releases = outbox, pool, views, releases
        self._callee, self._refused = callee, refused
        self.dead_letters = DeadLetters()

    # -- what is heard; with the lock held --------------------------------------------------------

    def called(self, peer: bytes, call: Call, frames: Frames) -> None:
        """Put a call into the mailbox, or refuse it."""
        try:
            payload = self._views.payload(call, frames)
        except CodecError:
            self._refused["malformed"] += 1
            return
        inline_bytes = len(call.body) or sum(map(len, frames[1:]))
        expires = call.until_s or time.monotonic() + call.budget_s  # it may have waited to be read
        incoming = Incoming(call, payload, peer, expires, inline_bytes)
        if call.run_id != self._run_id:
            self._reject(incoming, DeadReason.RUN, f"it belongs to run {call.run_id}, not {self._run_id}")
        elif call.to_incarnation != self.holder.incarnation:
            detail = f"it is for incarnation {call.to_incarnation}, this is {self.holder.incarnation}"
            self._reject(incoming, DeadReason.STALE, detail)
        elif not self._callee.take(incoming):
            self._reject(incoming, DeadReason.FULL, "its mailbox is full")
            self._outbox.say(peer, Credit(messages=1, bytes=inline_bytes))

    def queried(self, peer: bytes, query: Query) -> None:
        """Answer a question at once."""
        try:
            payload = self._stage_for(peer, self._callee.answer(query.what))
        except KeyError:
            message = f"there is no query {query.what!r}"
            self._outbox.say(peer, Failed(id=query.id, kind="refused", message=message))
        else:
            self._outbox.say(peer, Result(id=query.id, body=payload.body, bulk=payload.refs), payload)

    # -- answers; any thread ----------------------------------------------------------------------

    def respond(self, incoming: Incoming, value: Any) -> None:
        """Answer a call with what its method returned.

        Raises:
            CodecError: it cannot be sent.
        """
        self._releases.tell()  # before the answer, so that the caller's next argument finds the segment free
        if incoming.call.wants_reply:
            payload = self._stage_for(incoming.peer, value)
            answer = Result(id=incoming.call.id, body=payload.body, bulk=payload.refs)
            with self._lock:
                self._outbox.say(incoming.peer, answer, payload)

    def refuse(self, incoming: Incoming, failed: Failed) -> None:
        """Answer a call with a failure."""
        if incoming.call.wants_reply:
            with self._lock:
                self._outbox.say(incoming.peer, failed)

    def _reject(self, incoming: Incoming, reason: DeadReason, detail: str) -> None:
        self.dead_letters.add(reason, incoming.call, detail)
        kind = "full" if reason is DeadReason.FULL else "refused"
        self.refuse(incoming, Failed(id=incoming.call.id, kind=kind, message=detail))

    def _stage_for(self, peer: bytes, value: Any) -> Staged:
        frames = codec.pack(value)
        return self._pool.stage(frames, writable=True, local=not self._sockets.is_remote(peer))
