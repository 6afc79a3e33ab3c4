"""What users subclass: `Actor`, its `@endpoint` methods and the `Context` each actor gets.

An actor's main thread runs its constructor, its endpoints and `step`, one at a time. An endpoint or a
step must never wait for work: while it waits, no message is handled and no weights are installed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import msgspec

from relax_actor.actor.gang import Gang, abort_collectives
from relax_actor.ids import SPARE, Holder
from relax_actor.telemetry import EventLog

if TYPE_CHECKING:
    from relax_actor.actor.ref import Ref

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A", bound="Actor")


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint is called.

    Args:
        timeout_s: the caller's deadline where it gives none.
        idempotent: running it twice is as good as once, so that a call is sent again to the next
            incarnation when the callee dies with it.
        concurrency: how many calls of an async endpoint may be awaiting at once; further ones queue.
        max_runtime_s: longer than this and the actor counts as hung and is killed; None: no limit.
    """

    timeout_s: float = 60.0
    idempotent: bool = False
    concurrency: int = 1
    max_runtime_s: float | None = None


@overload
def endpoint(method: F) -> F: ...
@overload
def endpoint(
    *,
    timeout_s: float = 60.0,
    idempotent: bool = False,
    concurrency: int = 1,
    max_runtime_s: float | None = None,
) -> Callable[[F], F]: ...
def endpoint(
    method: F | None = None,
    *,
    timeout_s: float = 60.0,
    idempotent: bool = False,
    concurrency: int = 1,
    max_runtime_s: float | None = None,
) -> F | Callable[[F], F]:
    """Make a method callable from other processes; see `EndpointOptions`."""
    options = EndpointOptions(
        timeout_s=timeout_s,
        idempotent=idempotent,
        concurrency=concurrency,
        max_runtime_s=max_runtime_s,
    )

    def mark(method: F) -> F:
        method.__endpoint__ = options  # type: ignore[attr-defined]  # a mark on the user's own function
        return method

    return mark if method is None else mark(method)


def options_of(method: Callable[..., Any]) -> EndpointOptions | None:
    """Return the options of an endpoint, or None for a method that is not one."""
    options = getattr(method, "__endpoint__", None)
    return options if isinstance(options, EndpointOptions) else None


class Host(Protocol):
    """What a context needs of the process it lives in."""

    def wake(self) -> None:
        """Let `step` run again soon."""
        ...

    def finish(self) -> None:
        """End the process normally once the message at hand is done."""
        ...

    def progress(self, text: str) -> None:
        """Write on the status page how far the work has come."""
        ...

    def ref(self, name: str, actor: type[A]) -> "Ref[A]":
        """Return a ref that follows restarts of `name`."""
        ...

    def cancelled(self) -> bool:
        """Whether the caller of the endpoint that runs has given up."""
        ...

    @property
    def gang(self) -> Gang:
        """The collective group this actor is a rank of."""
        ...

    @property
    def shm_root(self) -> str:
        """Where this host's shared-memory segments live."""
        ...

    @property
    def listen(self) -> str:
        """This host's address for others, empty where there are no others."""
        ...

    @property
    def host(self) -> str:
        """The name of this host in the tree."""
        ...


class Context:
    """An actor's view of the tree it lives in. Set before the constructor runs."""

    def __init__(self, holder: Holder, run_id: str, run_dir: Path, events: EventLog, host: Host) -> None:
        self.holder, self.run_id, self.run_dir, self.events = holder, run_id, run_dir, events
        self._host = host

    @property
    def name(self) -> str:
        """`role/replica`, or the bare role where there is one replica."""
        return self.holder.name

    @property
    def incarnation(self) -> int:
        """How many times this actor has been started, from 1."""
        return self.holder.incarnation

    @property
    def replica(self) -> int:
        """Which replica of its role this is, from 0."""
        return int(self.name.rpartition("/")[2]) if "/" in self.name else 0

    @property
    def is_spare(self) -> bool:
        """Whether this process waits for the name of one that dies; see `Actor.on_promoted`."""
        return SPARE in self.name.split("/")

    def ref(self, name: str, actor: type[A]) -> "Ref[A]":
        """Return a ref to another actor; it is logical and follows restarts."""
        return self._host.ref(name, actor)

    def cancelled(self) -> bool:
        """Whether the caller of the synchronous endpoint that runs now has cancelled its call."""
        return self._host.cancelled()

    @property
    def gang(self) -> Gang:
        """The collective group this actor is a rank of, where its child spec says `gang`."""
        return self._host.gang

    @property
    def shm_root(self) -> str:
        """The folder of this host's shared-memory segments."""
        return self._host.shm_root

    @property
    def listen(self) -> str:
        """This host's address, by which other hosts of the tree reach it; empty where there are none."""
        return self._host.listen

    @property
    def host(self) -> str:
        """The name of this actor's host, as the tree has it."""
        return self._host.host

    def wake(self) -> None:
        """Let `step` run again as soon as the message at hand is done; any thread may call it."""
        self._host.wake()

    def finish(self) -> None:
        """End this actor normally; a permanent child is restarted, a transient one is not."""
        self._host.finish()

    def progress(self, text: str = "") -> None:
        """Say how far the work has come, for whoever looks at this actor, also after its death.

        Who says so is not taken for hung. Costs a store into shared memory; any thread may call it. What is
        beyond 256 bytes is cut off.
        """
        self._host.progress(text)


class Actor:
    """Base of all actors."""

    ctx: Context

    fatal: tuple[type[BaseException], ...] = ()
    """Errors after which the actor cannot go on: an endpoint that raises one fails its call and ends it."""

    def step(self) -> float | None:
        """Do a bounded piece of the actor's own work between two messages.

        Returns:
            Seconds until the next call (0: as soon as waiting messages are handled), or None to be
            called again only after a message, a finished reply or `ctx.wake()`.
        """
        return None

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:
        """Learn that an incarnation of another actor is gone; what it held may be taken back."""

    def on_promoted(self) -> None:
        """Learn the name and incarnation in `ctx`, which a spare does not know in its constructor."""

    def on_gang_abort(self, epoch: int) -> None:  # noqa: ARG002 - for those who override it
        """End this rank's collectives: another rank is lost. Runs in the I/O thread; be quick."""
        abort_collectives()

    def open_rendezvous(self, epoch: int, host: str) -> str:  # noqa: ARG002 - for those who override it
        """Open, in rank 0, where the ranks of a new epoch meet; runs before `on_regroup` does in any rank.

        Args:
            epoch: which group it is for.
            host: the address that other ranks reach this one by.

        Returns:
            What all ranks find in `ctx.gang.rendezvous`. Where torch is installed that is the `init_method`
            of a store in this process, at a port that the kernel gave.
        """
        return self.ctx.gang.open_store(host)

    def on_regroup(self, epoch: int) -> None:
        """Join the group of a new epoch, as `ctx.gang` describes it; what it raises ends the actor."""

    def on_drain(self) -> None:
        """Learn that this actor is to leave for good: take nothing new, and `ctx.finish()` when done.

        Messages and `step` go on until then. It is for a replica that is scaled away; who takes longer than
        its child spec's `elastic.drain_s` is stopped.
        """
        self.ctx.finish()

    def on_stop(self, reason: str) -> None:
        """Clean up before the process ends; bounded by the child spec's `shutdown_s`."""
