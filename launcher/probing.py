"""Asking all hosts at once what they are and have, each through the session that would start its agent.

As many sessions are opened at once as the options say, and one that an sshd refuses for want of room is tried
again a little later. What one session is: `probes`.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from launcher.probes import NoAnswerError, Probe, Terms
from launcher.ssh_causes import Attempt
from relax_actor.supervision.hosts import Host
from relax_actor.survey.records import Facts, Question, Reached, Targets

RETRY_S = 15.0
"""For how long a session that is refused for want of room is tried again."""


class Surveyed(msgspec.Struct, frozen=True, kw_only=True):
    """What all hosts said."""

    facts: dict[str, Facts] = {}
    attempts: dict[str, Attempt] = {}  # of those that said nothing
    unreached: dict[str, dict[str, str]] = {}  # host -> other host -> why there is no way
    skew_s: dict[str, float] = {}  # how far a host's clock is ahead of this one's
    took_s: float = 0.0


def survey(
    hosts: Sequence[Host],
    questions: Mapping[str, Question],
    targets: Callable[[Mapping[str, Facts]], Mapping[str, Targets]],
    terms: Terms = Terms(),  # noqa: B008 - frozen
) -> Surveyed:
    """Ask all hosts.

    Args:
        hosts: with names that differ.
        questions: for each, by name.
        targets: says, once everybody has answered, where each is to try to connect to.
        terms: how they are asked.
    """
    return asyncio.run(_Survey(hosts, questions, targets, terms).ask())


class _Survey:
    """One survey."""

    def __init__(
        self,
        hosts: Sequence[Host],
        questions: Mapping[str, Question],
        targets: Callable[[Mapping[str, Facts]], Mapping[str, Targets]],
        terms: Terms,
    ) -> None:
        self._hosts, self._questions, self._targets, self._terms = hosts, questions, targets, terms
        self._gate = asyncio.Semaphore(terms.fanout)
        self._barrier = _Barrier(len(hosts))
        self._end = _Barrier(len(hosts))
        self._facts: dict[str, Facts] = {}
        self._attempts: dict[str, Attempt] = {}
        self._unreached: dict[str, dict[str, str]] = {}
        self._skew_s: dict[str, float] = {}

    async def ask(self) -> Surveyed:
        since = time.monotonic()
        await asyncio.gather(*map(self._ask, self._hosts))
        return Surveyed(
            facts=self._facts,
            attempts=self._attempts,
            unreached={name: failures for name, failures in self._unreached.items() if failures},
            skew_s=self._skew_s,
            took_s=time.monotonic() - since,
        )

    async def _ask(self, host: Host) -> None:
        try:
            session = await self._opened(host)
        except NoAnswerError as error:
            self._attempts[host.name] = error.attempt
            self._barrier.passed()
            self._end.passed()
            return
        try:
            await self._connect(host, session)
        finally:
            self._end.passed()
            await self._end.wait()
            await session.close()

    async def _opened(self, host: Host) -> Probe:
        """Return a session whose host has answered.

        Raises:
            NoAnswerError: it has not.
        """
        until, tries = time.monotonic() + RETRY_S, 0
        while True:
            try:
                async with self._gate:
                    session = await Probe.open(host, self._terms)
                await self._take_facts(host, session)
            except NoAnswerError as error:
                tries += 1
                pattern = host.session.retry_on if host.session is not None else ""
                is_passing = bool(pattern and re.search(pattern, error.attempt.output))
                if not is_passing or time.monotonic() >= until:
                    raise
                await asyncio.sleep(random.uniform(0.1, 0.3) * tries)  # noqa: S311 - jitter
            else:
                return session

    async def _take_facts(self, host: Host, session: Probe) -> None:
        asked = time.time()
        session.say(self._questions[host.name])
        facts = await session.answer(Facts, self._terms.answer_s)
        self._facts[host.name] = facts
        # It looked at its clock between then and now: what may be a slow answer is no skew.
        self._skew_s[host.name] = min(max(0.0, facts.time_s - time.time()), facts.time_s - asked)

    async def _connect(self, host: Host, session: Probe) -> None:
        self._barrier.passed()
        await self._barrier.wait()
        targets = self._targets(self._facts).get(host.name, Targets())
        if targets.addresses:
            session.say(targets)
            try:
                found = await session.answer(Reached, self._terms.answer_s)
            except NoAnswerError as error:
                self._attempts[host.name] = error.attempt
                self._facts.pop(host.name)
            else:
                self._unreached[host.name] = found.failures


class _Barrier:
    """Opens when everybody has passed."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._open = asyncio.Event()

    def passed(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._open.set()

    async def wait(self) -> None:
        await self._open.wait()
