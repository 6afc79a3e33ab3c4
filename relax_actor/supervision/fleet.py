"""The node agents of a tree: listened to, given orders, and given up when their lease is over.

Facts about a host are one of two kinds. The end of a keeper's process says at once that nothing of the run is
left on its host (see `node.keeper`). Where no such word comes, only an expired lease does; see `node.lease`.
Until then the host's actors count as running, and nobody is started in their place.

How they come to be there is in `starts`. Every method runs in the courier's loop thread.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.actor.wire import NodeConfig, Record
from relax_actor.node.lease import Grants
from relax_actor.supervision.hosts import Host, choose, choose_home
from relax_actor.supervision.scaling import check_room
from relax_actor.supervision.site import Agent, Key, Place, Site
from relax_actor.supervision.spec import ChildSpec, Home
from relax_actor.supervision.starts import FAN_OUT, Starts, Waiting
from relax_actor.supervision.timers import Timers
from relax_actor.telemetry import EventLog
from transport.control import Frames

HANDOVER_LAG_S = 1.0
"""How long what an actor of another host has written may take to come here; several rounds of its porter."""


class Tree(Waiting, Protocol):
    """Whom a fleet tells."""

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
        self._starts = Starts(self._sites, config, events, fan_out)
        self._homes: dict[Key, Home] = {}
        self._tree: Tree
        self._courier: Courier
        self._timers: Timers
        self.refused: dict[str, int] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all hosts."""
        return frozenset(self._sites)

    def start(self, tree: Tree, courier: Courier) -> None:
        """Start an agent on every host; `tree` hears when all have joined."""
        self._tree, self._courier, self._timers = tree, courier, Timers(courier.loop)
        self._starts.begin(tree, self._agent_ended, courier, self._timers)
        self._look_later()

    def close(self) -> None:
        """End all agents and everything on them."""
        self._starts.close()
        self._timers.close()
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

    def check_room(self, spec: ChildSpec, replicas: int) -> None:
        """Check that there is a place for every new replica of a child.

        Raises:
            SpecError: there is none.
        """
        joined = {name for name, site in self._sites.items() if site.joined}
        check_room(spec, replicas, tuple(self._homes.values()), joined)

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
        site = self._starts.site_of(peer)
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
        self._grants.grant(site.name, time.monotonic())
        self._events.emit(
            "host_joined",
            host=site.name,
            agent=agent.incarnation,
            agent_pid=record.pid,
            node=record.node,
            shm_root=site.shm_root,
        )
        self._starts.joined(site, agent, record)

    # -- agents go ------------------------------------------------------------------------------

    def _agent_ended(self, site: Site, agent: Agent, how: str) -> None:
        """Take it that an agent's process is over; whether the agent is, the process may not say."""
        if agent.process.proves_the_end or agent.joined is None:
            self._lost(site, f"its node agent ended with {how}")
        else:  # the way to it is gone; it runs on until its lease is over
            self._events.emit("host_unreachable", host=site.name, reason=how)

    def _look_later(self) -> None:
        self._timers.later(self._config.lease.renew_s / 2, self._look)

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
        self._starts.forget(site)
        site.lost = reason
        lost = [key for key in site.actors if key not in site.waiting]
        self._events.emit("host_lost", host=name, agent=site.incarnation, reason=reason, actors=len(lost))
        site.sweep(lost)
        if joined and not site.is_remote:
            self._starts.want(site)
        else:
            self._starts.want_again(site)
        self._tree.actors_lost(lost, f"{name}: {reason}")


def _peer(key: Key) -> bytes:
    return f"{key[0]}#{key[1]}".encode()
