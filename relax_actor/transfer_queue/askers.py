"""Which replicas ask for prompts, or may be expected to ask at once: whom prompts are shared among. Pure.

A replica that was answered comes back within milliseconds, and one that was told of a newer version as soon
as it has installed it. A share is kept for those, but not for long, and once only until they ask again: who
is slow, hung, full, leaving or dead holds no work back.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from relax_actor.ids import Holder, PolicyVersion

HOLD_S = 0.03
"""How long a share is kept for a replica that has been answered, or has put samples."""

INSTALL_HOLD_S = 0.25
"""At most so long for one that installs a version; else as long again as the first of them has needed."""


@dataclass(slots=True, kw_only=True)
class Asker:
    """A replica, since it asked last."""

    holder: Holder
    version: PolicyVersion | None  # what it has installed, or installs
    slots: int  # samples it can take
    until_s: float = math.inf  # a share is kept for it until then; it waits for an answer where that is never
    told_s: float | None = None  # when it was told of a newer version
    has_put: bool = False  # since it was answered

    @property
    def is_here(self) -> bool:
        """Whether it waits for an answer."""
        return self.until_s == math.inf


class Askers:
    """All of them, by name."""

    def __init__(self) -> None:
        self._askers: dict[str, Asker] = {}

    def ask(self, holder: Holder, version: PolicyVersion | None, slots: int, now: float) -> Asker:
        """Learn of a request; the one before of the same replica is over."""
        before = self._askers.get(holder.name)
        self._askers[holder.name] = asker = Asker(holder=holder, version=version, slots=slots)
        if before is not None and before.told_s is not None and version == before.version:
            self._expect_installed(now, now - before.told_s)
        return asker

    def given(self, asker: Asker, samples: int, now: float) -> None:
        """Learn that a request was answered with prompts."""
        asker.slots -= samples
        asker.until_s = now + HOLD_S

    def told(self, asker: Asker, version: PolicyVersion, now: float) -> None:
        """Learn that a request was answered with a newer version."""
        asker.version, asker.until_s, asker.told_s = version, -math.inf, now

    def put(self, name: str, samples: int, now: float) -> None:
        """Learn that a replica has put samples, so that it has room for others."""
        asker = self._askers.get(name)
        if asker is not None and not asker.is_here and not asker.has_put:
            asker.slots = max(0, asker.slots) + samples
            asker.until_s, asker.has_put = now + HOLD_S, True

    def over(self, asker: Asker) -> None:
        """Learn that a request has ended; nobody expects the next one if it was not answered."""
        if asker.is_here and self._askers.get(asker.holder.name) is asker:
            del self._askers[asker.holder.name]

    def gone(self, name: str, incarnation: int) -> None:
        """Learn of the death of a replica's incarnation, and of older ones."""
        asker = self._askers.get(name)
        if asker is not None and asker.holder.incarnation <= incarnation:
            del self._askers[name]

    def others(self, asker: Asker, now: float) -> list[Asker]:
        """Return who else has a share in what there is now, and can sample with the same version."""
        return [
            each
            for each in self._askers.values()
            if each is not asker and each.slots > 0 and each.until_s > now and each.version == asker.version
        ]

    def _expect_installed(self, now: float, took_s: float) -> None:
        for each in self._askers.values():
            if each.told_s is not None and each.until_s == -math.inf:
                each.until_s = now + min(max(took_s, HOLD_S), INSTALL_HOLD_S)


def next_return(askers: Iterable[Asker]) -> float | None:
    """Return when the first share that is kept for somebody is given to others, in the queue's seconds."""
    return min((each.until_s for each in askers if not each.is_here), default=None)
