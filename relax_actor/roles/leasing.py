"""How the queue hands prompts out: each replica that asks gets its share, and all where nobody else asks."""

import contextlib
from collections.abc import Callable, Iterator

from relax_actor.ids import Holder, PolicyVersion
from relax_actor.protocol import Leased
from relax_actor.transfer_queue.askers import Asker, Askers, next_return
from relax_actor.transfer_queue.ledger import Ledger


class Leasing:
    """Who asks for prompts, and what they get.

    Args:
        ledger: that decides.
        clock: of the queue, in seconds.
        wake: has `look_again_s` looked at.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._ledger, self._clock, self._wake = ledger, clock, wake
        self._askers = Askers()
        self.look_again_s: float | None = None
        """When a share that is kept for somebody is given to others, in the queue's seconds."""

    @contextlib.contextmanager
    def asking(self, holder: Holder, version: PolicyVersion | None, max_samples: int) -> Iterator[Asker]:
        """Count a rollout among those who ask."""
        asker = self._askers.ask(holder, version, max_samples, self._clock())
        try:
            yield asker
        finally:
            self._askers.over(asker)

    def leased(self, asker: Asker, newest: PolicyVersion) -> Leased | None:
        """Return a rollout's share of what there is, or that it is behind; None where it has to wait."""
        now, version = self._clock(), asker.version
        if version is None or version < newest:
            self._askers.told(asker, newest, now)
            return Leased(policy_version=newest)
        others = self._askers.others(asker, now)
        rooms = {each.holder: each.slots for each in others}
        prompts = self._ledger.lease_prompts(asker.holder, version, asker.slots, now, rooms)
        samples = sum(len(lease.missing) for lease in prompts)
        if samples < asker.slots and self._ledger.has_prompts:
            self._keep(next_return(others))
        if not prompts:
            return None
        self._askers.given(asker, samples, now)
        return Leased(prompts=tuple(prompts), policy_version=newest)

    def put(self, holder: Holder, samples: int) -> None:
        """Count on a rollout that has put samples to ask for others."""
        self._askers.put(holder.name, samples, self._clock())

    def gone(self, name: str, incarnation: int) -> None:
        """Keep nothing for a dead rollout."""
        self._askers.gone(name, incarnation)

    def is_time(self, now: float) -> bool:
        """Whether what was kept for somebody is to be given to others; each time is told once."""
        if self.look_again_s is None or now < self.look_again_s:
            return False
        self.look_again_s = None
        return True

    def _keep(self, until_s: float | None) -> None:
        if until_s is not None and (self.look_again_s is None or until_s < self.look_again_s):
            self.look_again_s = until_s
            self._wake()
