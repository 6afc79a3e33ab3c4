"""Replicas of one host install in turn, so that the pool never stands still.

A turn is a lock (flock) on one of a few small segments. The kernel gives it back with its holder's death; a
stopped holder keeps one turn and no more. Nobody waits for a turn: who has none decodes on with the version
it has, and installs without one before its samples would be too old to be trained on.
"""

import contextlib
from types import TracebackType
from typing import Self

from relax_actor.ids import PolicyVersion
from transport.shm import SegmentExistsError, SegmentLock, SegmentMissingError, ShmSpace

OWNER = "dcs-turns"


def may_wait(
    installed: PolicyVersion | None, newest: PolicyVersion, *, in_flight: int, max_staleness: int
) -> bool:
    """Whether a replica loses nothing by installing `newest` later.

    Args:
        installed: what it samples from; None where it has no whole version.
        newest: the newest version there is.
        in_flight: samples it decodes; without any it stands still already.
        max_staleness: how many versions behind the trainer a sample's oldest token may be.
    """
    return installed is not None and in_flight > 0 and newest - installed <= max_staleness


class Turn:
    """The right to install; given back at the end of the context."""

    def __init__(self, lock: SegmentLock | None) -> None:
        self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()


class InstallTurns:
    """The turns of one host.

    Args:
        space: the run's shared memory.
        replicas: how many there are on this host; at most half of them install at a time.
    """

    def __init__(self, space: ShmSpace, replicas: int) -> None:
        self._space = space
        self._labels = [f"slot{index}" for index in range(max(1, replicas // 2))]

    def take(self) -> Turn | None:
        """Take a turn, or return None at once where all are taken."""
        for label in self._labels:
            lock = self._try_lock(label)
            if lock is not None:
                return Turn(lock)
        return None

    def _try_lock(self, label: str) -> SegmentLock | None:
        with contextlib.suppress(SegmentExistsError):
            self._space.create(OWNER, 0, label, 1).close()
        try:
            return self._space.try_lock(self._space.name(OWNER, 0, label))
        except SegmentMissingError:  # somebody sweeps the run's memory
            return None


WITHOUT = Turn(None)
"""The turn of a replica that must not wait for one."""
