"""One host of a tree as the fleet knows it: its node agent, if there is one, and the actors placed there."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec

from relax_actor.actor import wire
from relax_actor.actor.wire import NodeConfig
from relax_actor.node.names import agent_identity
from relax_actor.supervision.host import AgentProcess
from relax_actor.supervision.hosts import Host
from transport.shm import ShmSpace

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
        return Place(socket_dir=self.joined.socket_dir, run_dir=self.host.run_dir or self._config.run_dir)

    def start_agent(self, head: str) -> Agent:
        """Start the next incarnation of its agent.

        Args:
            head: where other hosts reach the head.
        """
        self.incarnation += 1
        suffix = f"-{self.name}" if self.is_remote else ""
        log = Path(self._config.run_dir) / "logs" / f"agent{suffix}.log"
        process = AgentProcess(self._agent_config(head), self.host.prefix, self.host.interpreter, log)
        self.agent = Agent(process, agent_identity(self.name, self.incarnation), self.incarnation)
        return self.agent

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

    def _agent_config(self, head: str) -> NodeConfig:
        common = msgspec.structs.replace(
            self._config,
            host=self.name,
            agent_incarnation=self.incarnation,
            listen=self.host.address,
            shm_root=self.shm_root,
            run_dir=self.host.run_dir or self._config.run_dir,
        )
        if not self.is_remote:
            return common
        return msgspec.structs.replace(common, head=head, head_pid=0, socket_dir="")
