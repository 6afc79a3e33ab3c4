"""Who is alive at time t: the lease a node agent holds of the head, decided without a clock or a socket.

An agent asks for its lease again every `renew_s`; the head grants it. Each side counts on its own monotonic
clock and never sends a time: the holder from the moment it ASKED, the grantor from the moment it GRANTED,
which is later. So the holder's lease is over before the grantor's patience, whatever the network delays,
loses or delivers late, as long as the two clocks run equally fast to within `drift_frac`. An actor of a
host that was declared lost may therefore be started elsewhere: it cannot run twice.

Refused: the head's beats alone as a sign of life (a beat that was long on its way would prolong a lease that
the head has given up), and any judgement by a delay's statistics: busy is not dead.

Where agent and keeper are stopped, nobody ends the actors when the lease is over. So within the head's
`margin_s` two more fences act: an actor that looks at its agent's lease (`ActorFence`) ends itself and says
why; then the kernel kills the agent by a timer that the agent set (`fuse`), and the actors with it.
"""

import math

import msgspec


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How long a host that the head cannot hear is still believed in."""

    ttl_s: float = 10.0
    """An agent that could not renew for so long ends its actors and itself."""
    renew_s: float = 2.0
    """How often it asks; several times within `ttl_s`, so that one lost message costs nothing."""
    drift_frac: float = 0.1
    """How much faster one host's clock may run than another's."""
    margin_s: float = 1.0
    """What the head waits beyond that, for the fence to act."""

    @property
    def patience_s(self) -> float:
        """How long after its last grant the head declares a host lost."""
        return self.ttl_s * (1.0 + self.drift_frac) + self.margin_s

    @property
    def actor_grace_s(self) -> float:
        """How long after its agent's lease an actor ends itself, if nobody else has."""
        return self.margin_s * 0.25

    @property
    def kernel_grace_s(self) -> float:
        """How long after its lease the kernel ends an agent, if nobody else has."""
        return self.margin_s * 0.75


class HeldLease:
    """The agent's side.

    Args:
        terms: of the lease.
        until_s: when to give up if nothing is ever granted; seconds of the holder's clock.
    """

    def __init__(self, terms: LeaseTerms, until_s: float) -> None:
        self._terms, self.until_s = terms, until_s
        self._asked: dict[int, float] = {}
        self._last = 0
        self.is_granted = False

    def ask(self, now_s: float) -> int:
        """Note that the lease is asked for now; return the number of the request."""
        self._last += 1
        self._asked[self._last] = now_s
        return self._last

    def granted(self, number: int, now_s: float) -> bool:
        """Prolong the lease to `ttl_s` after request `number` was made.

        Returns:
            Whether it is held. One that was over stays over, and an unknown or older grant changes nothing.
        """
        if self.is_over(now_s) or number not in self._asked:
            return False
        self.until_s = self._asked[number] + self._terms.ttl_s
        self._asked = {later: at for later, at in self._asked.items() if later > number}
        self.is_granted = True
        return not self.is_over(now_s)

    def is_over(self, now_s: float) -> bool:
        """Whether nothing may be done under it any more."""
        return now_s >= self.until_s


class ActorFence:
    """An actor's side: whether it must end itself, since nobody above it has.

    It goes by the agent's lease as shared memory shows it at the moment of the look, and counts nothing
    between looks. So one that could not look for long (it was stopped, or the interpreter lock was held)
    is not late: it finds the newest lease.

    Args:
        terms: of the lease.
    """

    def __init__(self, terms: LeaseTerms) -> None:
        self._grace_s = terms.actor_grace_s
        self._over_s = math.nan  # the end of the lease that was found to be over

    def look(self, now_s: float, until_s: float) -> float | None:
        """Return how soon to look again at the latest, in seconds; None: the lease is over.

        What is over is looked at twice, since the first look may have met a write half done.

        Args:
            now_s: CLOCK_BOOTTIME; read BEFORE `until_s`, or a stop between the two would look like a delay.
            until_s: the end of the lease.
        """
        left_s = until_s + self._grace_s - now_s
        if left_s > 0:
            return left_s
        if until_s == self._over_s:
            return None
        self._over_s = until_s
        return 0.0


class Grants:
    """The head's side: which hosts hold a lease.

    Args:
        terms: of the leases.
        now_s: seconds of the head's clock.
    """

    def __init__(self, terms: LeaseTerms, now_s: float) -> None:
        self._terms, self._looked_s = terms, now_s
        self._granted: dict[str, float] = {}

    @property
    def alive(self) -> frozenset[str]:
        """The hosts that are believed in."""
        return frozenset(self._granted)

    def grant(self, host: str, now_s: float) -> None:
        """Give a host a lease, or prolong it."""
        self._granted[host] = now_s

    def withdraw(self, host: str) -> None:
        """Forget a host that is known to be gone."""
        self._granted.pop(host, None)

    def expired(self, now_s: float) -> list[str]:
        """Return the hosts that are lost now, each once; to be called every `renew_s` or more often.

        Where the call itself comes late the head was paused, heard nobody, and waits that much longer.
        """
        pause_s = now_s - self._looked_s - self._terms.renew_s
        self._looked_s = now_s
        if pause_s > 0:
            self._granted = {host: at + pause_s for host, at in self._granted.items()}
        lost = [host for host, at in self._granted.items() if now_s - at >= self._terms.patience_s]
        for host in lost:
            del self._granted[host]
        return lost
