"""The version on its way to this host, by whichever way its bytes come: begun, summed up, shown or refused.

For one thread. A bucket that came by one way stays here when the rest comes by another.
"""

import time
from typing import Any, Protocol

import xxhash

from relax_actor.dcs.manifest import Manifest, PolicyCorruptError
from relax_actor.dcs.relay.chain import Haul
from relax_actor.dcs.store import HostStore
from relax_actor.ids import PolicyVersion
from transport.shm import SegmentSpaceError


class Emit(Protocol):
    """Where events go; see `telemetry.EventLog.emit`."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Append one event."""
        ...


class Intake:
    """What a store takes in.

    Args:
        store: where versions go; it has a shelf.
        emit: where events go.

    Attributes:
        haul: what of the version on its way is here, None while none is.
    """

    def __init__(self, store: HostStore, emit: Emit) -> None:
        self.haul: Haul | None = None
        self._store, self._emit = store, emit
        self._began = 0.0
        self._refused: PolicyVersion | None = None
        self._sum = xxhash.xxh3_64()  # of the bucket whose bytes come

    def have(self) -> int:
        """Return the newest version that is not to come again: it is here, or was refused; -1 for none."""
        return max(-1 if seen is None else seen for seen in (self._store.latest(), self._refused))

    def begin(self, manifest: Manifest) -> None:
        """Start a version.

        Raises:
            PolicyBudgetError: it cannot fit into the memory allowed.
        """
        self._store.begin(manifest)
        self.haul, self._began = Haul(manifest), time.monotonic()

    def target(self, bucket: int) -> memoryview:
        """Return where the bytes of a bucket of the version on its way go.

        Raises:
            PolicyBudgetError: there is too little memory by the budget.
            SegmentSpaceError: there is too little of it in the file system.
            ValueError: no version is on its way.
        """
        if (incoming := self._store.incoming) is None:
            raise ValueError("no version is on its way")
        return incoming.target(bucket)

    def sum_up(self, piece: memoryview, *, is_first: bool) -> None:
        """Note the next bytes of a bucket, best while they are in the cache."""
        if is_first:
            self._sum.reset()
        self._sum.update(piece)

    def check(self, manifest: Manifest, bucket: int, upstream: str) -> PolicyCorruptError | None:
        """Compare a bucket, all of which was summed up; show it to others where it is right."""
        expected, found = manifest.buckets[bucket].xxh3, self._sum.hexdigest()
        if found == expected:
            self._store.verified(bucket)
            return None
        self._emit("relay_damaged", version=manifest.version, bucket=bucket, upstream=upstream)
        return PolicyCorruptError(manifest.version, bucket, expected, found)

    def finish(self, upstream: str, relay: str) -> None:
        """Show the version, all of which is here.

        Args:
            upstream: who sent the last of it.
            relay: by which way: `chain` or `group`.
        """
        haul, self.haul = self.haul, None
        if haul is None:
            return
        self._store.finish()
        self._emit(
            "policy_relayed",
            version=haul.version,
            upstream=upstream,
            relay=relay,
            bytes=haul.manifest.nbytes,
            seconds=time.monotonic() - self._began,
        )

    def give_up(self, reason: str) -> None:
        """Drop the version on its way."""
        haul, self.haul = self.haul, None
        if haul is not None:
            self._store.give_up()
            self._emit("relay_skipped", version=haul.version, here_bytes=haul.here_bytes, reason=reason)

    def refuse(self, version: PolicyVersion, error: PolicyCorruptError | SegmentSpaceError) -> None:
        """Never begin this version again: it is not what was published, or there is no room for it."""
        self._refused = version
        self._emit("policy_refused", version=version, reason=str(error))
        self.give_up("refused")

    def close(self) -> None:
        """Leave nothing of what is half here."""
        self._store.give_up()
