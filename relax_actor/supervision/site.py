"""One host of a tree as the fleet knows it: its node agent, if there is one, and the actors placed there."""

import random
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec

from relax_actor.actor import wire
from relax_actor.actor.wire import NodeConfig
from relax_actor.node.inband import Boot
from relax_actor.node.names import agent_identity
from relax_actor.supervision.host import AgentProcess
from relax_actor.supervision.hosts import Host, Session
from relax_actor.supervision.intake import Files
from transport.address import Address
from transport.shm import ShmSpace

RETRY_S = 0.2
"""How long after a start that failed for a passing reason the next is tried; grows to `RETRY_MAX_S`."""

TOLD_CHARS = 2000
"""How much of the output of a start that failed goes into the event log."""

RETRY_GROWTH = 1.6
RETRY_MAX_S = 5.0

Key: TypeAlias = tuple[str, int]
"""Name and incarnation of an actor."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files of a joined host's actors go."""

    socket_dir: str
    run_dir: str


class Agent:
    """One incarnation of a host's node agent."""

    def __init__(self, process: AgentProcess, identity: bytes, incarnation: int) -> None:
        self.process, self.identity, self.incarnation = process, identity, incarnation
        self.joined: wire.AgentReady | None = None
        self.is_over = False  # its process has ended, which may not prove anything

    @property
    def facts(self) -> dict[str, object]:
        """What is known of one that did not join; who knows the way there can tell the cause."""
        intake = self.process.intake
        refused = intake.refused if intake is not None else None
        return {
            "agent": self.incarnation,
            "code": self.process.code,
            "answered": intake is not None and intake.began is not None,
            "refusal": refused.kind if refused is not None else "",
            "fact": self.process.refusal,
            "output": self.process.output[-TOLD_CHARS:],
        }


class Site:
    """A host, its agent if there is one, and the actors that were placed there.

    Args:
        host: which one.
        config: what the processes of all hosts have in common.

    Attributes:
        actors: pid of each actor here, or 0 while it is not known.
        waiting: what is done for an actor once the host has joined.
        lost: why it was given up last.
    """

    def __init__(self, host: Host, config: NodeConfig) -> None:
        self.host, self._config = host, config
        self.agent: Agent | None = None
        self.incarnation = 0
        self.rejoins = 0
        self.attempts = 0  # to reach it since it was last reached
        self._since_s = 0.0  # when the first of them was made
        self.files = Files(Path(config.run_dir))
        self.lost = ""
        self.actors: dict[Key, int] = {}
        self.waiting: dict[Key, Callable[[Place], None]] = {}

    @property
    def name(self) -> str:
        """The host's."""
        return self.host.name

    @property
    def is_remote(self) -> bool:
        """Whether it is another host than the head's."""
        return bool(self.host.prefix)

    @property
    def joined(self) -> wire.AgentReady | None:
        """What its agent said of itself, if it is there."""
        return self.agent.joined if self.agent else None

    @property
    def shm_root(self) -> str:
        """Where its shared memory is."""
        return self.host.shm_root or self._config.shm_root

    @property
    def place(self) -> Place | None:
        """Where the files of its actors go, once it has joined."""
        if self.joined is None:
            return None
        return Place(socket_dir=self.joined.socket_dir, run_dir=self.run_dir)

    @property
    def run_dir(self) -> str:
        """Where its actors write."""
        return self.host.run_dir or self._config.run_dir

    @property
    def readable_dir(self) -> str:
        """Where people find on the head's host what its actors write, if it comes there."""
        return self._config.run_dir if self.host.is_handed_over else self.run_dir

    def start_agent(self, head: str, on_reached: Callable[[], None] = lambda: None) -> Agent:
        """Start the next incarnation of its agent.

        Args:
            head: where other hosts reach the head.
            on_reached: called, in another thread, once a host with a session has answered.
        """
        self.incarnation += 1
        suffix = f"-{self.name}" if self.is_remote else ""
        log = Path(self._config.run_dir) / "logs" / f"agent{suffix}.log"
        self._since_s = self._since_s if self.attempts else time.monotonic()
        self.attempts += 1
        session = self.host.session
        process = AgentProcess(
            self._agent_config(head),
            self.host.prefix,
            self.host.interpreter,
            log,
            boot=self._boot(session, head) if session is not None and self.is_remote else None,
            env=dict(session.env) if session is not None and not self.is_remote else None,
            files=self.files,
            on_reached=on_reached,
        )
        self.agent = Agent(process, agent_identity(self.name, self.incarnation), self.incarnation)
        return self.agent

    def is_worth_another_try(self, within_s: float) -> bool:
        """Whether its last agent was not reached for a reason that passes.

        Args:
            within_s: of the first try.
        """
        intake = self.agent.process.intake if self.agent is not None else None
        if self.agent is None or intake is None or self.host.session is None:
            return False
        pattern, output = self.host.session.retry_on, self.agent.process.output
        is_reached = intake.began is not None
        is_late = time.monotonic() - self._since_s >= within_s
        return not is_reached and not is_late and bool(pattern and re.search(pattern, output))

    def retry_delay_s(self) -> float:
        """Return how long to wait before the next try: longer each time, and random."""
        return random.uniform(0.5, 1.5) * min(RETRY_S * RETRY_GROWTH**self.attempts, RETRY_MAX_S)  # noqa: S311 - jitter

    def let_in(self) -> None:
        """Do what waits for the host to join, if it has."""
        if (place := self.place) is not None:
            waiting, self.waiting = self.waiting, {}
            for action in waiting.values():
                action(place)

    def sweep(self, actors: Iterable[Key]) -> None:
        """Remove the shared memory of actors that are gone; on another host its keeper does so."""
        if not self.is_remote:
            space = ShmSpace(self._config.run_id, self.shm_root)
            for key in actors:
                space.sweep(*key)

    def describe(self) -> str:
        """Return what is known of an agent that has not joined."""
        if self.agent is None:
            return self.name
        process = self.agent.process
        lines = process.log.read_text(errors="replace").rstrip().splitlines()
        quoted = f'last log: "{lines[-1][:400]}"' if lines else f"nothing in {process.log}"
        return f"{self.name} ({process.state}, {quoted})"

    def _boot(self, session: Session, head: str) -> Boot:
        from relax_actor import __version__  # noqa: PLC0415 - the package imports this module

        return Boot(
            version=__version__,
            word=secrets.token_hex(16),
            workdir=session.workdir,
            env=session.env,
            setup=session.setup,
            head=Address.parse(head).host,
            interface=session.interface,
            no_proxy=session.no_proxy,
            run_id=self._config.run_id,
            shm_root=self.shm_root,
            run_dir=self.run_dir,
            offsets=self.files.offsets,
        )

    def _agent_config(self, head: str) -> NodeConfig:
        common = msgspec.structs.replace(
            self._config,
            host=self.name,
            agent_incarnation=self.incarnation,
            listen=self.host.address,
            shm_root=self.shm_root,
            run_dir=self.run_dir,
            term_is_for_head=self.host.term_is_for_head,
        )
        if not self.is_remote:
            return common
        return msgspec.structs.replace(common, head=head, head_pid=0, socket_dir="")
