"""What every route has in common: a source that opens a version, and a version that is open.

A source says what it cannot do by one of three errors, and the puller then tries the next one:
`SourceUnavailableError` (nobody is there), `PolicyMissingError` (not this version) and `PolicyCorruptError`
(not what was published).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from relax_actor.dcs.ahead import Ahead
from relax_actor.dcs.manifest import Manifest
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver, PolicySnapshot
from relax_actor.dcs.routes import Route
from relax_actor.errors import RelaxError
from relax_actor.ids import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class SourceUnavailableError(RelaxError):
    """A route cannot be taken at all now; another one may.

    Args:
        route: which one.
        reason: why not.
    """

    def __init__(self, route: Route, reason: str) -> None:
        self.route, self.reason = route, reason
        super().__init__(f"route {route}: {reason}")


class OpenVersion(Protocol):
    """A policy version that stays as it is while it is open."""

    @property
    def manifest(self) -> Manifest:
        """What it consists of."""
        ...

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield Hugging Face names and tensors; each is to be copied before the next is asked for.

        Raises:
            PolicyCorruptError: a bucket is not what was published; raised before any of its tensors.
            PolicyMissingError, SourceUnavailableError: it was lost on the way.
        """
        ...


class PolicySource(Protocol):
    """One way to policy versions."""

    @property
    def route(self) -> Route:
        """Which way this is."""
        ...

    def latest(self) -> PolicyVersion | None:
        """Return the newest version it knows it could open; None where it knows none.

        Asked only for a replica without weights, so it may take a second or two.
        """
        ...

    def open(self, version: PolicyVersion) -> AbstractContextManager[OpenVersion]:
        """Open a version, or a newer one where that has taken its place; held until the context ends.

        Raises:
            SourceUnavailableError: this way is closed.
            PolicyMissingError: it does not lead to this version.
            PolicyCorruptError: what it leads to is damaged.
        """
        ...


@runtime_checkable
class PreparedSource(PolicySource, Protocol):
    """A source that can do a part of `open` while the replica still decodes."""

    def prepare(self, version: PolicyVersion) -> bool:
        """Begin, unless that has been done; return whether `open` would not wait for it."""
        ...


class SharedMemorySource:
    """The buckets in the shared memory of this host. What is opened has been verified, all of it.

    Args:
        receiver: of this run.
    """

    route = Route.SHARED_MEMORY

    def __init__(self, receiver: PolicyReceiver) -> None:
        self._receiver = receiver
        self._ahead = Ahead(self._verified)

    def latest(self) -> PolicyVersion | None:
        """Return the newest version in shared memory, also where nobody announces it any more."""
        announced = self._receiver.latest()
        return self._receiver.newest_visible() if announced is None else announced

    def open(self, version: PolicyVersion) -> AbstractContextManager[PolicySnapshot]:
        """Lease a version and verify all of it, so that damage is found before an install has begun."""
        return closing(self._ahead.take(version) or self._verified(version))

    def prepare(self, version: PolicyVersion) -> bool:
        """Lease and verify a version in a thread; what that finds is said by `open`."""
        return self._ahead.prepare(version)

    def _verified(self, version: PolicyVersion) -> PolicySnapshot:
        snapshot = self._leased(version)
        try:
            snapshot.verify()
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def _leased(self, version: PolicyVersion) -> PolicySnapshot:
        try:
            return self._receiver.open(version)
        except PolicyMissingError as error:
            if error.latest is None or error.latest <= version:
                raise
            return self._receiver.open()  # it was retired since it was announced
