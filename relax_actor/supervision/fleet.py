"""The node agents of a tree: started, joined, listened to, and given up when their lease is over.

Facts about a host are one of two kinds. The end of a keeper's process says at once that nothing of the run is
left on its host (see `node.keeper`). Where no such word comes, only an expired lease does; see `node.lease`.
Until then the host's actors count as running, and nobody is started in their place.

Every method runs in the courier's loop thread.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.actor.wire import NodeConfig, Record
from relax_actor.node.lease import Grants
from relax_actor.node.names import agent_identity
from relax_actor.supervision.gate import Gate
from relax_actor.supervision.hosts import Host, choose, choose_home
from relax_actor.supervision.site import Agent, Key, Place, Site
from relax_actor.supervision.spec import ChildSpec, Home
from relax_actor.telemetry import EventLog
from transport.control import Frames

REJOIN_S = 1.0
"""How long after a host was lost an agent is started there again; doubling to `REJOIN_MAX_S`."""

REJOIN_MAX_S = 30.0


HANDOVER_LAG_S = 1.0
"""How long what an actor of another host has written may take to come here; several rounds of its porter."""

FAN_OUT = 32
"""How many sessions to other hosts may be on their way at once; an sshd behind which many are takes ten."""


class Tree(Protocol):
    """Whom a fleet tells."""

    def all_joined(self) -> None:
        """Hear that every host has joined; once."""
        ...

    def not_joined(self, reason: str) -> None:
        """Hear that the barrier fell: who is missing, and what is known of them; once."""
        ...

    def agent_said(self, record: Record) -> None:
        """Hear what an agent has to say of its actors."""
        ...

    def actors_lost(self, actors: Sequence[Key], reason: str) -> None:
        """Hear that a host is gone with these actors."""
        ...


class Fleet:
    """All hosts of a tree.

    Args:
        hosts: checked by `hosts.check_hosts`.
        config: what the processes of all hosts have in common; the rest is filled in for each.
        events: where joins and losses go.
        fan_out: how many sessions to other hosts may be on their way at once.
    """

    def __init__(
        self, hosts: Sequence[Host], config: NodeConfig, events: EventLog, fan_out: int = FAN_OUT
    ) -> None:
        self._sites = {host.name: Site(host, config) for host in hosts}
        self._config, self._events = config, events
        self._grants = Grants(config.lease, time.monotonic())
        self._by_identity: dict[bytes, Site] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._gate = Gate(fan_out, self._start_agent)
        self._is_barrier_up = True
        self._is_closed = False
        self._homes: dict[Key, Home] = {}
        self._tree: Tree
        self._courier: Courier
        self.refused: dict[str, int] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all hosts."""
        return frozenset(self._sites)

    def start(self, tree: Tree, courier: Courier) -> None:
        """Start an agent on every host; `tree` hears when all have joined."""
        self._tree, self._courier = tree, courier
        for site in self._sites.values():
            self._want_agent(site)
        self._look_later()

    def close(self) -> None:
        """End all agents and everything on them."""
        self._is_closed = True
        self._gate.close()
        for timer in self._timers:
            timer.cancel()
        agents = [site.agent for site in self._sites.values() if site.agent and not site.agent.is_over]
        for site in self._sites.values():
            if site.agent and site.agent.is_over and site.joined:  # the way there is gone, but not the line
                self._courier.say(site.agent.identity, wire.Shutdown())
        for agent in agents:
            self._courier.loop.remove_reader(agent.process.pidfd)
            if agent.joined:
                agent.process.begin_end()
            else:  # it may be busy importing, and there is nothing on it yet
                agent.process.end_now()
        for agent in agents:
            agent.process.finish_end()

    # -- actors ---------------------------------------------------------------------------------

    def place(self, key: Key, spec: ChildSpec, replica: int) -> Home:
        """Choose the place of a new incarnation, which counts as running there from now on."""
        home = self._homes[key] = self._choose(spec, replica)
        site = self._sites[home.host]
        site.actors[key] = 0
        if site.is_remote:
            self._courier.lines.open(_peer(key), self._config.epoch, key[1])
        return home

    def _choose(self, spec: ChildSpec, replica: int) -> Home:
        joined = {name for name, site in self._sites.items() if site.joined}
        if spec.homes:
            return choose_home(spec.homes, replica, spec.replicas, joined, self._homes.values())
        host = choose(spec.hosts or (next(iter(self._sites)),), replica, joined)
        return Home(host=host, devices=spec.devices)

    def absence(self, host: str) -> str:
        """Return why a host is not there, or nothing where it is, or will be at once."""
        site = self._sites[host]
        is_on_its_way = not site.is_remote and not site.rejoins  # the head's own host has lost its agent only
        return "" if site.joined or is_on_its_way else site.lost or "it has not joined"

    def when_joined(self, key: Key, action: Callable[[Place], None]) -> None:
        """Run `action` once the host of `key` has joined: now, or when it comes back."""
        site = self._site_of(key)
        if site is not None:
            site.waiting[key] = action
            site.let_in()

    def say(self, key: Key, record: Record, frames: Frames = ()) -> None:
        """Give an order about an actor to the agent of its host."""
        site = self._site_of(key)
        if site is None:
            return
        if site.waiting.pop(key, None) is not None:  # nothing of it was started
            self._courier.loop.call_soon(self._never_started, site, key)
        elif site.agent is not None:
            self._courier.say(site.agent.identity, record, frames)

    def spawned(self, key: Key, pid: int) -> None:
        """Note the process of an actor."""
        site = self._site_of(key)
        if site is not None and site.agent is not None:
            site.actors[key] = pid
            site.agent.process.started(pid)

    def renamed(self, old: Key, new: Key) -> None:
        """Note that a spare has become an incarnation of an actor, in the process it has."""
        site = self._site_of(old)
        if site is not None:
            site.actors[new] = site.actors.pop(old)
            self._homes[new] = self._homes.pop(old)
            if site.is_remote:
                self._courier.lines.open(_peer(new), self._config.epoch, new[1])

    def gone(self, key: Key) -> None:
        """Forget an actor that is over."""
        site = self._site_of(key)
        self._homes.pop(key, None)
        if site is not None:
            self._courier.lines.close(_peer(key))
            pid = site.actors.pop(key)
            site.waiting.pop(key, None)
            if site.agent is not None:
                site.agent.process.ended(pid)

    def host_of(self, key: Key | None) -> str | None:
        """Return the host of an actor, or of the head for None; None where it is not there (any more)."""
        if key is None:
            return next((name for name, site in self._sites.items() if not site.is_remote), None)
        site = self._site_of(key)
        return site.name if site else None

    def ask_host(self, name: str, record: Record) -> bool:
        """Ask the agent of a host something; False where there is none."""
        site = self._sites.get(name)
        if site is None or site.agent is None or not site.joined:
            return False
        self._courier.say(site.agent.identity, record)
        return True

    def whereabouts(self, key: Key) -> dict[str, str]:
        """Return what people need to find an actor: its host by both names, and the log's folder there."""
        site = self._site_of(key)
        if site is None or site.joined is None or site.place is None:
            return {}
        return {"site": site.name, "host": site.joined.node, "run_dir": site.readable_dir}

    def lag_s(self, key: Key) -> float:
        """Return how long an actor's files may take to come to the head."""
        site = self._site_of(key)
        return HANDOVER_LAG_S if site is not None and site.host.is_handed_over else 0.0

    def _site_of(self, key: Key) -> Site | None:
        return next((site for site in self._sites.values() if key in site.actors), None)

    def _never_started(self, site: Site, key: Key) -> None:
        self._tree.actors_lost([key], f"host {site.name} did not come back")

    # -- what agents say ------------------------------------------------------------------------

    def heard(self, peer: bytes, record: Record) -> bool:
        """Take a record of an agent; False if it is not one's that is believed in."""
        site = self._by_identity.get(peer)
        if site is None or site.agent is None:
            return False
        match record:
            case wire.Renew():
                self._grants.grant(site.name, time.monotonic())
            case wire.AgentReady():
                self._joined(site, site.agent, record)
            case _:
                self._tree.agent_said(record)
        return True

    def refuse(self, peer: bytes) -> None:
        """Count a message of an agent or an actor that was given up; the first is logged."""
        name = peer.decode(errors="replace")
        if name not in self.refused:
            self._events.emit("peer_refused", peer=name)
        self.refused[name] = self.refused.get(name, 0) + 1

    def _joined(self, site: Site, agent: Agent, record: wire.AgentReady) -> None:
        agent.joined = record
        agent.process.agent_pid = record.pid
        site.rejoins = site.attempts = 0
        self._grants.grant(site.name, time.monotonic())
        self._events.emit(
            "host_joined",
            host=site.name,
            agent=agent.incarnation,
            agent_pid=record.pid,
            node=record.node,
            shm_root=site.shm_root,
        )
        site.let_in()
        if self._is_barrier_up and all(each.joined for each in self._sites.values()):
            self._is_barrier_up = False
            self._tree.all_joined()

    # -- agents come and go ---------------------------------------------------------------------

    def _want_agent(self, site: Site) -> None:
        """Start an agent, of another host when its turn comes."""
        if site.host.is_handed_over:
            self._gate.enter(site)
        else:
            self._start_agent(site)

    def _start_agent(self, site: Site) -> None:
        agent = site.start_agent(
            str(self._courier.remote_address), lambda: self._courier.run_soon(self._gate.leave, site)
        )
        self._courier.lines.open(agent.identity, self._config.epoch, agent.incarnation)
        self._by_identity[agent.identity] = site
        self._courier.loop.add_reader(agent.process.pidfd, self._process_ended, site)
        self._courier.hear_early(agent.process.news)
        self._later(self._config.join_timeout_s, self._is_late, site, agent)

    def _process_ended(self, site: Site) -> None:
        agent = site.agent
        assert agent is not None  # noqa: S101 - its pidfd is watched for as long as there is one
        self._courier.loop.remove_reader(agent.process.pidfd)
        how, agent.is_over = agent.process.reap(), True
        self._gate.leave(site)
        if agent.joined is None:
            self._events.emit("host_not_reached", host=site.name, how=how, **agent.facts)
        if site.is_worth_another_try(self._config.join_timeout_s):
            self._again(site)
        elif self._is_barrier_up:
            self._give_up()
        elif agent.process.proves_the_end or agent.joined is None:
            self._lost(site, f"its node agent ended with {how}")
        else:  # the way to it is gone; it runs on until its lease is over
            self._events.emit("host_unreachable", host=site.name, reason=how)

    def _again(self, site: Site) -> None:
        """Try once more to reach a host, after a random while: those who were refused together come apart."""
        self._forget_agent(site)
        self._later(site.retry_delay_s(), self._rejoin, site)

    def _look_later(self) -> None:
        self._later(self._config.lease.renew_s / 2, self._look)

    def _look(self) -> None:
        for name in self._grants.expired(time.monotonic()):
            site = self._sites[name]
            if site.agent is not None and site.joined:
                self._expired(site, site.agent)
        self._look_later()

    def _expired(self, site: Site, agent: Agent) -> None:
        reason = f"it renewed no lease for {self._config.lease.patience_s:g} s"
        if not agent.is_over:
            agent.process.kill()
            if not site.is_remote:  # the kernel will say when it is gone
                return
            self._courier.loop.remove_reader(agent.process.pidfd)
            agent.process.reap()
        self._lost(site, reason)

    def _lost(self, site: Site, reason: str) -> None:
        """Forget the agent and its actors, which are gone by now, and try to start another."""
        name, joined = site.name, site.joined
        self._grants.withdraw(name)
        self._forget_agent(site)
        site.lost = reason
        lost = [key for key in site.actors if key not in site.waiting]
        self._events.emit("host_lost", host=name, agent=site.incarnation, reason=reason, actors=len(lost))
        site.sweep(lost)
        if joined and not site.is_remote:
            self._want_agent(site)
        else:
            self._later(min(REJOIN_S * 2.0**site.rejoins, REJOIN_MAX_S), self._rejoin, site)
            site.rejoins += 1
        self._tree.actors_lost(lost, f"{name}: {reason}")

    def _forget_agent(self, site: Site) -> None:
        identity = agent_identity(site.name, site.incarnation)
        self._courier.lines.close(identity)
        self._by_identity.pop(identity, None)
        site.agent = None

    def _rejoin(self, site: Site) -> None:
        if not self._is_closed:
            self._want_agent(site)

    # -- the join barrier -----------------------------------------------------------------------

    def _is_late(self, site: Site, agent: Agent) -> None:
        if self._is_barrier_up:
            self._give_up()
        elif site.agent is agent and not agent.joined:
            agent.process.kill()  # another is started when it has ended

    def _give_up(self) -> None:
        self._is_barrier_up = False
        missing = [site for site in self._sites.values() if not site.joined]
        count = f"{len(self._sites) - len(missing)} of {len(self._sites)} hosts joined"
        self._tree.not_joined(f"{count}; missing: {', '.join(each.describe() for each in missing)}")

    def _later(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        def run() -> None:
            self._timers.discard(timer)
            action(*args)

        timer = self._courier.loop.call_later(delay_s, run)
        self._timers.add(timer)


def _peer(key: Key) -> bytes:
    return f"{key[0]}#{key[1]}".encode()
