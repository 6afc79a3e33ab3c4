"""Rollouts lend one another what they have installed: the endpoints, and who asks them."""

import contextlib
from collections.abc import Mapping

from relax_actor.actor import Actor, Context, endpoint
from relax_actor.dcs.loans import Lender, PolicyLoan, PolicyPart
from relax_actor.errors import ActorError
from relax_actor.ids import PolicyVersion

OFFER_S = 1.0
"""A peer that does not answer by then is busy, stopped or away."""

PART_S = 10.0


class LendingActor(Actor):
    """An actor whose installed policy version others may borrow."""

    lender: Lender

    @endpoint(timeout_s=OFFER_S, idempotent=True)
    def offered_version(self) -> PolicyVersion | None:
        """Return the version that may be borrowed now."""
        return self.lender.offer

    @endpoint(timeout_s=OFFER_S)
    def lend_policy(self, version: PolicyVersion) -> PolicyLoan | None:
        """Lend a version for a while; None where it is not the installed one."""
        return self.lender.lend(version)

    @endpoint(timeout_s=PART_S)
    def lent_part(self, loan_id: int, index: int) -> PolicyPart | None:
        """Return a part of a lent version; None where the loan is over."""
        return self.lender.part(loan_id, index)

    @endpoint
    def return_policy(self, loan_id: int) -> None:
        """End a loan."""
        self.lender.give_back(loan_id)


class ActorPeers:
    """Other replicas of an actor's role, to borrow from.

    Args:
        context: of the actor that borrows.
        replicas: how many there are, itself included.
    """

    def __init__(self, context: Context, replicas: int) -> None:
        role = context.name.rpartition("/")[0]
        names = [f"{role}/{index}" for index in range(replicas) if index != context.replica]
        self._refs = {name: context.ref(name, LendingActor) for name in names}

    def offers(self) -> Mapping[str, PolicyVersion]:
        """Ask all at once; return what those offer that answer."""
        replies = {name: ref.ask(LendingActor.offered_version) for name, ref in self._refs.items()}
        offers = {}
        for name, reply in replies.items():
            with contextlib.suppress(ActorError):  # also one that borrows from us just now
                offers[name] = reply.result()
        return {name: version for name, version in offers.items() if version is not None}

    def lend(self, peer: str, version: PolicyVersion) -> PolicyLoan | None:
        """Ask for a loan."""
        return self._refs[peer].ask(LendingActor.lend_policy, version).result()

    def part(self, peer: str, loan_id: int, index: int) -> PolicyPart | None:
        """Ask for a part of a lent version; None where the loan is over."""
        return self._refs[peer].ask(LendingActor.lent_part, loan_id, index).result()

    def give_back(self, peer: str, loan_id: int) -> None:
        """End a loan; nobody waits for an answer."""
        self._refs[peer].tell(LendingActor.return_policy, loan_id)
