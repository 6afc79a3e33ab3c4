"""A replica lends the weights it has installed to another one that finds them nowhere better.

A loan is of one version and ends by itself. While it lasts the lender puts its own installs off, as long as
it may; if it must not, the loan is void, which every part says by its version. Weights travel in parts of
bounded size, in the lender's element type, each with a checksum of its own.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.dcs.layout import fill_buckets, write
from relax_actor.dcs.manifest import Manifest, TensorEntry, checksum
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.clock import Clock, SystemClock

if TYPE_CHECKING:
    from torch import Tensor

LOAN_S = 20.0
PART_BYTES = 32 << 20


class PolicyLoan(msgspec.Struct, frozen=True, kw_only=True):
    """The right to copy a version out of a replica, for a while."""

    loan_id: int
    manifest: Manifest  # as published; the lender's element types may be others


class PolicyPart(msgspec.Struct, frozen=True, kw_only=True):
    """Some tensors of a lent version."""

    version: PolicyVersion
    tensors: tuple[TensorEntry, ...]  # of bucket 0, which is `data`
    data: npt.NDArray[np.uint8]  # [bytes], laid out as a bucket
    xxh3: str  # of `data`


class Readable(Protocol):
    """What of an engine a lender needs; see `relax_actor.engines.base.Engine`."""

    @property
    def can_read_back(self) -> bool:
        """Whether it can show installed weights; one that cannot lends none."""
        ...

    @property
    def version(self) -> PolicyVersion | None:
        """The installed version."""
        ...

    def weights(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":
        """Show installed weights."""
        ...


def parts(manifest: Manifest, part_bytes: int = PART_BYTES) -> list[tuple[str, ...]]:
    """Deal a version's tensors, in their order, to parts; a larger tensor has one to itself. Pure."""
    dealt: list[tuple[str, ...]] = []
    names: list[str] = []
    left = part_bytes
    for entry in manifest.tensors:
        if names and entry.nbytes > left:
            dealt.append(tuple(names))
            names, left = [], part_bytes
        names.append(entry.name)
        left -= entry.nbytes
    return [*dealt, tuple(names)] if names else dealt


class Lender:
    """Lends what an engine has installed.

    Args:
        engine: of this replica.
        clock: what loans end by.
        loan_s: how long one lasts at most, in seconds.
    """

    def __init__(self, engine: Readable, *, clock: Clock | None = None, loan_s: float = LOAN_S) -> None:
        self._engine, self._clock, self._loan_s = engine, clock or SystemClock(), loan_s
        self._manifest: Manifest | None = None
        self._parts: list[tuple[str, ...]] = []
        self._ends: dict[int, float] = {}  # by loan
        self._loans = 0

    @property
    def is_lending(self) -> bool:
        """Whether a loan lasts."""
        now = self._clock.monotonic()
        self._ends = {loan: end for loan, end in self._ends.items() if end > now}
        return bool(self._ends)

    @property
    def offer(self) -> PolicyVersion | None:
        """The version that may be borrowed now."""
        return self._manifest.version if self._manifest is not None and self._is_whole() else None

    def installed(self, manifest: Manifest) -> None:
        """Note what the engine has now; loans of anything else are void."""
        self._manifest, self._parts = manifest, parts(manifest)
        self._ends.clear()

    def lend(self, version: PolicyVersion) -> PolicyLoan | None:
        """Lend a version; None where it is not the one that is installed."""
        if self._manifest is None or self.offer != version:
            return None
        self._loans += 1
        self._ends[self._loans] = self._clock.monotonic() + self._loan_s
        return PolicyLoan(loan_id=self._loans, manifest=self._manifest)

    def part(self, loan_id: int, index: int) -> PolicyPart | None:
        """Copy a part of a lent version; None where the loan is over."""
        if not self.is_lending or loan_id not in self._ends or self._manifest is None or not self._is_whole():
            return None
        part = _packed(self._manifest.version, self._engine.weights(self._parts[index]))
        point("policy_lent")
        return part

    def give_back(self, loan_id: int) -> None:
        """End a loan. Idempotent."""
        self._ends.pop(loan_id, None)

    def _is_whole(self) -> bool:
        is_same = self._manifest is not None and self._engine.version == self._manifest.version
        return is_same and self._engine.can_read_back


def _packed(version: PolicyVersion, weights: "Iterator[tuple[str, Tensor]]") -> PolicyPart:
    (bucket,) = fill_buckets(weights, 1 << 62)
    data = np.zeros(bucket.nbytes, np.uint8)
    data[: len(bucket.head)] = np.frombuffer(bucket.head, np.uint8)
    for placed in bucket.tensors:
        write(placed, data[placed.offset : placed.offset + placed.nbytes])
    entries = tuple(
        TensorEntry(name=p.name, dtype=p.dtype, shape=p.shape, bucket=0, offset=p.offset, nbytes=p.nbytes)
        for p in bucket.tensors
    )
    return PolicyPart(version=version, tensors=entries, data=data, xxh3=checksum(data.data))
