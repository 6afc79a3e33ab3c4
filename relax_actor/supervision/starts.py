"""How node agents come to be there: started a few at a time, tried again, waited for at a barrier.

Until every host has joined nothing of the tree is started (the join barrier): a host that cannot be reached
ends the start, and with it the run, before an actor has done anything. Later, one host more or less is no
reason to end: its agent is started again for as long as the tree is there.

Every method runs in the courier's loop thread.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeAlias

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.actor.wire import NodeConfig
from relax_actor.node.names import agent_identity
from relax_actor.supervision.gate import Gate
from relax_actor.supervision.site import Agent, Site
from relax_actor.supervision.timers import Timers
from relax_actor.telemetry import EventLog

REJOIN_S = 1.0
"""How long after a host was lost an agent is started there again; doubling to `REJOIN_MAX_S`."""

REJOIN_MAX_S = 30.0

FAN_OUT = 32
"""How many sessions to other hosts may be on their way at once; an sshd behind which many are takes ten."""


class Waiting(Protocol):
    """Who waits at the barrier."""

    def all_joined(self) -> None:
        """Hear that every host has joined; once."""
        ...

    def not_joined(self, reason: str) -> None:
        """Hear that the barrier fell: who is missing, and what is known of them; once."""
        ...


OnEnd: TypeAlias = Callable[[Site, Agent, str], None]
"""Hears that an agent's process is over, how it ended, and that no other has been started for it."""


class Starts:
    """Starts the node agents of a tree.

    Args:
        sites: all hosts, by name.
        config: what the processes of all hosts have in common.
        events: where hosts that were not reached go.
        fan_out: how many sessions to other hosts may be on their way at once.
    """

    def __init__(
        self, sites: Mapping[str, Site], config: NodeConfig, events: EventLog, fan_out: int = FAN_OUT
    ) -> None:
        self._sites, self._config, self._events = sites, config, events
        self._gate = Gate(fan_out, self._start)
        self._by_identity: dict[bytes, Site] = {}
        self._is_barrier_up = True
        self._is_closed = False
        self._tree: Waiting
        self._on_end: OnEnd
        self._courier: Courier
        self._timers: Timers

    def begin(self, tree: Waiting, on_end: OnEnd, courier: Courier, timers: Timers) -> None:
        """Start an agent on every host."""
        self._tree, self._on_end, self._courier, self._timers = tree, on_end, courier, timers
        for site in self._sites.values():
            self.want(site)

    def close(self) -> None:
        """Start nobody any more."""
        self._is_closed = True
        self._gate.close()

    def want(self, site: Site) -> None:
        """Start an agent, of another host when its turn comes."""
        if self._is_closed:
            return
        if site.host.is_handed_over:
            self._gate.enter(site)
        else:
            self._start(site)

    def want_again(self, site: Site) -> None:
        """Start an agent on a host that was lost, later each time."""
        self._timers.later(min(REJOIN_S * 2.0**site.rejoins, REJOIN_MAX_S), self.want, site)
        site.rejoins += 1

    def joined(self, site: Site, agent: Agent, record: wire.AgentReady) -> None:
        """Note that an agent is there; whoever waits for its host is let in."""
        agent.joined = record
        agent.process.agent_pid = record.pid
        site.rejoins = site.attempts = 0
        site.let_in()
        if self._is_barrier_up and all(each.joined for each in self._sites.values()):
            self._is_barrier_up = False
            self._tree.all_joined()

    def site_of(self, peer: bytes) -> Site | None:
        """Return the host of an agent that is believed in."""
        return self._by_identity.get(peer)

    def forget(self, site: Site) -> None:
        """Believe no more in the agent of a host."""
        identity = agent_identity(site.name, site.incarnation)
        self._courier.lines.close(identity)
        self._by_identity.pop(identity, None)
        site.agent = None

    def _start(self, site: Site) -> None:
        agent = site.start_agent(
            str(self._courier.remote_address), lambda: self._courier.run_soon(self._gate.leave, site)
        )
        self._courier.lines.open(agent.identity, self._config.epoch, agent.incarnation)
        self._by_identity[agent.identity] = site
        self._courier.loop.add_reader(agent.process.pidfd, self._process_ended, site)
        self._courier.hear_early(agent.process.news)
        self._timers.later(self._config.join_timeout_s, self._is_late, site, agent)

    def _process_ended(self, site: Site) -> None:
        agent = site.agent
        assert agent is not None  # noqa: S101 - its pidfd is watched for as long as there is one
        self._courier.loop.remove_reader(agent.process.pidfd)
        how, agent.is_over = agent.process.reap(), True
        self._gate.leave(site)
        if agent.joined is None:
            self._events.emit("host_not_reached", host=site.name, how=how, **agent.facts)
        if site.is_worth_another_try(self._config.join_timeout_s):
            self._try_again(site)
        elif self._is_barrier_up:
            self._give_up()
        else:
            self._on_end(site, agent, how)

    def _try_again(self, site: Site) -> None:
        """Try once more to reach a host, after a random while: those who were refused together come apart."""
        self.forget(site)
        self._timers.later(site.retry_delay_s(), self.want, site)

    def _is_late(self, site: Site, agent: Agent) -> None:
        if self._is_barrier_up:
            self._give_up()
        elif site.agent is agent and not agent.joined:
            agent.process.kill()  # another is started when it has ended

    def _give_up(self) -> None:
        self._is_barrier_up = False
        self._tree.not_joined(_missing(self._sites.values()))


def _missing(sites: Collection[Site]) -> str:
    """Return who has not joined, and what is known of them."""
    missing = [site for site in sites if not site.joined]
    count = f"{len(sites) - len(missing)} of {len(sites)} hosts joined"
    return f"{count}; missing: {', '.join(each.describe() for each in missing)}"
