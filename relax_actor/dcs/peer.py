"""The route from replica to replica: borrow a version from whoever has it installed.

If a lender is lost half way, the next one that has the same version goes on with the part that is missing.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from relax_actor.dcs.layout import tensor_view
from relax_actor.dcs.loans import PART_BYTES, PolicyLoan, PolicyPart, parts
from relax_actor.dcs.manifest import Manifest, PolicyCorruptError, checksum
from relax_actor.dcs.receiver import PolicyMissingError
from relax_actor.dcs.routes import Route
from relax_actor.dcs.source import SourceUnavailableError
from relax_actor.errors import ActorError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class Peers(Protocol):
    """The other replicas; each call but `offers` raises `ActorError` where the peer does not answer."""

    def offers(self) -> Mapping[str, PolicyVersion]:
        """Return what each peer that answers at once would lend."""
        ...

    def lend(self, peer: str, version: PolicyVersion) -> PolicyLoan | None:
        """Ask for a loan."""
        ...

    def part(self, peer: str, loan_id: int, index: int) -> PolicyPart | None:
        """Ask for a part of a lent version; None where the loan is over."""
        ...

    def give_back(self, peer: str, loan_id: int) -> None:
        """End a loan; nobody waits for an answer."""
        ...


class PeerSource:
    """What other replicas have installed.

    Args:
        peers: without this one.
    """

    route = Route.PEER

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def latest(self) -> PolicyVersion | None:
        """Ask all peers; return the newest version that one of them would lend."""
        return max(self._peers.offers().values(), default=None)

    @contextlib.contextmanager
    def open(self, version: PolicyVersion) -> Iterator["PeerVersion"]:
        """Borrow a version; the loan ends with the context.

        Raises:
            SourceUnavailableError: no peer offers anything.
            PolicyMissingError: none of them has this version.
        """
        offers = self._peers.offers()
        if not offers:
            raise SourceUnavailableError(self.route, "no other replica has a policy version to lend")
        having = [peer for peer, offered in offers.items() if offered == version]
        opened = PeerVersion(self._peers, version, having, max(offers.values()))
        try:
            yield opened
        finally:
            opened.close()


class PeerVersion:
    """A version that is borrowed, from one peer at a time.

    Args:
        peers: whom to ask.
        version: what for.
        having: who offered it.
        newest: the newest version that anybody offered.

    Raises:
        PolicyMissingError: none of them lends it.
    """

    def __init__(
        self, peers: Peers, version: PolicyVersion, having: list[str], newest: PolicyVersion
    ) -> None:
        self._peers, self._version, self._having, self._newest = peers, version, having, newest
        self._peer = ""
        self._loan = self._next_loan()

    @property
    def manifest(self) -> Manifest:
        """As published; what is lent may be of another element type."""
        return self._loan.manifest

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield names and tensors, part by part.

        Raises:
            PolicyCorruptError: a part was altered on its way.
            PolicyMissingError: the last lender has gone on to another version, or is lost.
        """
        for index in range(len(parts(self.manifest, PART_BYTES))):
            part = self._part(index)
            found = checksum(part.data.data)
            if found != part.xxh3:
                raise PolicyCorruptError(self._version, index, part.xxh3, found)
            point("install_bucket")
            for entry in part.tensors:
                yield entry.name, tensor_view(entry, part.data[entry.offset : entry.offset + entry.nbytes])

    def close(self) -> None:
        """Give the loan back."""
        self._peers.give_back(self._peer, self._loan.loan_id)

    def _part(self, index: int) -> PolicyPart:
        while True:
            with contextlib.suppress(ActorError):
                part = self._peers.part(self._peer, self._loan.loan_id, index)
                if part is not None and part.version == self._version:
                    return part
            self._loan = self._next_loan()

    def _next_loan(self) -> PolicyLoan:
        while self._having:
            self._peer = self._having.pop(0)
            with contextlib.suppress(ActorError):
                loan = self._peers.lend(self._peer, self._version)
                if loan is not None:
                    return loan
        raise PolicyMissingError(self._version, self._newest, "with any other replica")
