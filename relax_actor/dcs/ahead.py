"""Leases and verifies the next policy version in a thread, while the replica still decodes with the old one.

What is left to do between two decode steps is to copy. Verifying reads every byte and lets other threads run
meanwhile. The lease that it takes is the one the install uses: nobody rewrites what was verified.
"""

import threading
from collections.abc import Callable

from relax_actor.dcs.receiver import PolicySnapshot
from relax_actor.ids import PolicyVersion


class Ahead:
    """One version at a time, the one that was asked for last.

    Args:
        verified: leases and verifies a version; called in a thread.
    """

    def __init__(self, verified: Callable[[PolicyVersion], PolicySnapshot]) -> None:
        self._verified = verified
        self._check: _Check | None = None

    def prepare(self, version: PolicyVersion) -> bool:
        """Begin with a version, unless that has been done; return whether `take` would not wait."""
        if self._check is None or self._check.version != version:
            self.drop()
            self._check = _Check(self._verified, version)
        return self._check.is_done

    def take(self, version: PolicyVersion) -> PolicySnapshot | None:
        """Return what was begun with `prepare(version)`, waiting for its end; None where nothing was.

        Raises:
            RelaxError: what `verified` raised.
        """
        check, self._check = self._check, None
        if check is None or check.version != version:
            self._check = check
            return None
        return check.result()

    def drop(self) -> None:
        """Let go of what was begun. Idempotent."""
        check, self._check = self._check, None
        if check is not None:
            check.abandon()


class _Check:
    """One version being verified."""

    def __init__(self, verified: Callable[[PolicyVersion], PolicySnapshot], version: PolicyVersion) -> None:
        self.version = version
        self._verified = verified
        self._snapshot: PolicySnapshot | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._done = threading.Event()
        threading.Thread(target=self._run, name="verify", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> PolicySnapshot | None:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._snapshot

    def abandon(self) -> None:
        self._is_abandoned = True
        self._close_if_nobody_will()

    def _run(self) -> None:
        try:
            self._snapshot = self._verified(self.version)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            self._error = error
        self._done.set()
        self._close_if_nobody_will()

    def _close_if_nobody_will(self) -> None:
        """Give the lease back; of the two threads the one that comes last does, or both."""
        if self._is_abandoned and self._done.is_set() and self._snapshot is not None:
            self._snapshot.close()
