"""The thin shell round `policy.TreePolicy`: facts in, commands out, in the courier's loop thread.

It holds no opinion: the policy decides what is started, stopped and restarted; the node agent does it.
What the shell adds is telling every actor who is up and who is gone, and writing the event log.
"""

import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.actor.wire import NodeConfig, PeerGone, PeerUp, Record
from relax_actor.node import process
from relax_actor.supervision import commands, events
from relax_actor.supervision.crash import CrashGatherer, Death
from relax_actor.supervision.fleet import Fleet, Key, Place
from relax_actor.supervision.host import actor_address
from relax_actor.supervision.policy import NodeStatus, TreePolicy
from relax_actor.telemetry import EventLog
from transport import codec
from transport.control import Frames

log = logging.getLogger(__name__)


class TreeShell:
    """Carries out one tree's commands. Every method runs in the courier's loop thread.

    Args:
        policy: who decides.
        fleet: the hosts.
        config: what all processes of the run have in common.
        events_log: where spawns, exits and the policy's reports go.
        on_change: called after every command and report, to wake whoever waits for the tree.
    """

    def __init__(
        self,
        policy: TreePolicy,
        fleet: Fleet,
        config: NodeConfig,
        events_log: EventLog,
        on_change: Callable[[], None],
    ) -> None:
        self._policy, self._fleet = policy, fleet
        self._config, self._events, self._on_change = config, events_log, on_change
        self._courier: Courier
        self._timers: dict[str, Any] = {}
        self._listeners: set[bytes] = set()
        self._up: dict[str, wire.Ready] = {}
        self._near: dict[Key, str] = {}  # where actors take the calls of their own host
        self._pids: dict[tuple[str, int], int] = {}
        self._ready: set[tuple[str, int]] = set()
        self._told_to_stop: set[tuple[str, int]] = set()
        self._crashes = CrashGatherer()
        self.finished: commands.Finished | None = None
        self.is_ready = False

    def start(self, courier: Courier) -> None:
        """Start the node agents; the tree starts when all have joined."""
        self._courier = courier
        self._tell_tree("tree_started")
        self._fleet.start(self, courier)

    def handle(self, event: events.Event) -> None:
        """Give the policy a fact and carry out what it decides."""
        for command in self._policy.handle(event, time.monotonic()):
            self._carry_out(command)
        if isinstance(event, events.AddChild | events.RemoveChild):
            self._tell_tree("tree_changed")
        self._on_change()

    def pid(self, name: str) -> int | None:
        """Return the pid of the incarnation that is there, if any."""
        return next((pid for (each, _), pid in self._pids.items() if each == name), None)

    def close(self) -> None:
        """End the node agent and everything on it."""
        self._fleet.close()
        self._crashes.close()

    def _tell_tree(self, kind: str) -> None:
        """Log what people need to look into the run while this process is hung."""
        self._events.emit(
            kind,
            run_id=self._config.run_id,
            host=os.uname().nodename,
            start_ticks=process.start_time(os.getpid()),
            shm_root=self._config.shm_root,
            tree=_outline(self._policy.snapshot()),
        )

    # -- the fleet ------------------------------------------------------------------------------

    def all_joined(self) -> None:
        """Start the tree."""
        self.handle(events.StartAll())

    def not_joined(self, reason: str) -> None:
        """End before anything was started."""
        self.finished = self.finished or commands.Finished(outcome="failed", reason=reason)
        self._on_change()

    def actors_lost(self, actors: Sequence[Key], reason: str) -> None:
        """Take it that these actors are gone with their host."""
        for name, incarnation in actors:
            self._gone(name, incarnation, events.Exit(kind=events.ExitKind.LEASE, detail=reason))

    def agent_said(self, record: Record) -> None:
        """Take what a node agent says of an actor."""
        match record:
            case wire.Spawned():
                self._spawned(record)
            case wire.Exited():
                self._exited(record)
            case wire.Dying():
                self._dying(record)
            case _:
                log.warning("unexpected %s from a node agent", type(record).__name__)

    def _say_agent(self, record: wire.Kill) -> None:
        self._fleet.say((record.name, record.incarnation), record)

    # -- records heard --------------------------------------------------------------------------

    def heard(self, peer: bytes, record: Record, _frames: Frames) -> None:
        """Take a record of a node agent or of an actor."""
        match record:
            case _ if self._fleet.heard(peer, record):
                return
            case wire.Carried():
                self._fleet.refuse(peer)
            case wire.Hello() | wire.Ready() if not self._fleet.host_of((record.name, record.incarnation)):
                self._fleet.refuse(peer)
            case wire.Renew():
                return
            case wire.Hello():
                self._listeners.add(peer)
                for name in self._up:
                    self._courier.say(peer, self._seen_by(_key_of(peer), name))
            case wire.Ready():
                self._actor_ready(record)
            case _:
                log.warning("unexpected %s from %s", type(record).__name__, peer.decode(errors="replace"))

    def _spawned(self, record: wire.Spawned) -> None:
        self._pids[record.name, record.incarnation] = record.pid
        self._fleet.spawned((record.name, record.incarnation), record.pid)
        self._events.emit(
            "child_spawned",
            child=record.name,
            incarnation=record.incarnation,
            pid=record.pid,
            start_ticks=process.start_time(record.pid),
            log=str(self._log_path(record.name, record.incarnation)),
        )

    def _actor_ready(self, record: wire.Ready) -> None:
        key = record.name, record.incarnation
        self._ready.add(key)
        self._up[record.name] = record
        self._courier.peer_up(self._seen_by(None, record.name))
        for peer in self._listeners:
            self._courier.say(peer, self._seen_by(_key_of(peer), record.name))
        self.handle(events.Ready(name=record.name, incarnation=record.incarnation))

    def _seen_by(self, viewer: Key | None, name: str) -> PeerUp:
        """Say where an actor takes the calls of another one, or of the head."""
        up = self._up[name]
        key = up.name, up.incarnation
        is_near = self._fleet.host_of(viewer) == self._fleet.host_of(key)
        return PeerUp(
            name=name, incarnation=up.incarnation, address=self._near[key] if is_near else up.address
        )

    def _dying(self, record: wire.Dying) -> None:
        """Fail the calls it had; its restart waits for the kernel's word that it is gone."""
        if (up := self._up.get(record.name)) is not None and up.incarnation == record.incarnation:
            del self._up[record.name]
        self._listeners.discard(f"{record.name}#{record.incarnation}".encode())
        self._courier.peer_dying(record)
        self._broadcast(record)
        fields = {"child": record.name, "incarnation": record.incarnation, "reason": record.reason}
        self._events.emit("child_dying", **fields)

    def _exited(self, record: wire.Exited) -> None:
        key = record.name, record.incarnation
        if record.error and key not in self._ready:
            error = _last_line(record.error)
            self.handle(events.InitFailed(name=record.name, incarnation=record.incarnation, error=error))
        self._gone(*key, self._classify(record))

    def _classify(self, record: wire.Exited) -> events.Exit:
        if record.held:
            return events.Exit(kind=events.ExitKind.DEVICE_LOST, signal=record.signal, detail=record.held)
        if record.oom:
            return events.Exit(kind=events.ExitKind.OOM, signal=record.signal, detail=record.oom)
        told = (record.name, record.incarnation) in self._told_to_stop
        if record.code == 0:
            return events.Exit(kind=events.ExitKind.STOPPED if told else events.ExitKind.NORMAL, code=0)
        if record.signal is not None:
            kind = events.ExitKind.STOPPED if told else events.ExitKind.SIGNAL
            return events.Exit(kind=kind, signal=record.signal)
        return events.Exit(kind=events.ExitKind.ERROR, code=record.code, detail=_last_line(record.error))

    def _gone(self, name: str, incarnation: int, how: events.Exit) -> None:
        pid = self._pids.pop((name, incarnation), 0)
        self._fleet.gone((name, incarnation))
        self._near.pop((name, incarnation), None)
        self._listeners.discard(f"{name}#{incarnation}".encode())
        gone = PeerGone(name=name, incarnation=incarnation, reason=str(how))
        if (up := self._up.get(name)) is not None and up.incarnation == incarnation:
            del self._up[name]
        self._courier.peer_gone(gone)
        self._broadcast(gone)
        death = Death(
            name=name,
            incarnation=incarnation,
            pid=pid,
            exit=how,
            log=self._log_path(name, incarnation),
            crash=self._crash_path(name, incarnation),
        )
        self._events.emit(
            "child_exited",
            child=name,
            incarnation=incarnation,
            pid=pid,
            reason=str(how),
            exit=how.kind.value,
            code=how.code,
            signal=how.signal,
            line=(line := death.line),
        )
        self._crashes.gather(death, line)
        self.handle(events.Gone(name=name, incarnation=incarnation, exit=how))

    def _broadcast(self, record: Record) -> None:
        for listener in self._listeners:
            self._courier.say(listener, record)

    # -- commands -------------------------------------------------------------------------------

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.Spawn():
                self._spawn(command)
            case commands.Stop():
                self._stop(command)
            case commands.Kill():
                self._say_agent(wire.Kill(name=command.name, incarnation=command.incarnation))
            case commands.SetTimer():
                self._timers[command.timer] = self._courier.loop.call_later(
                    command.delay_s, self._fire, command.timer
                )
            case commands.CancelTimer():
                if (timer := self._timers.pop(command.timer, None)) is not None:
                    timer.cancel()
            case commands.Report():
                self._report(command)
            case commands.Finished():
                self.finished = command

    def _spawn(self, command: commands.Spawn) -> None:
        key = command.name, command.incarnation
        arguments = codec.pack(command.spec.args)
        self._fleet.place(key, command.spec.hosts, command.replica)
        self._fleet.when_joined(
            key, lambda site: self._fleet.say(key, self._spawn_record(command, site), arguments)
        )

    def _spawn_record(self, command: commands.Spawn, site: Place) -> wire.Spawn:
        name, incarnation = command.name, command.incarnation
        file = f"{name.replace('/', '-')}-{incarnation}"
        self._near[name, incarnation] = str(actor_address(site.socket_dir, name, incarnation))
        return wire.Spawn(
            name=name,
            incarnation=incarnation,
            target=target_of(command.spec.actor),
            zygote=command.spec.zygote,
            address=self._near[name, incarnation],
            log=f"{site.run_dir}/logs/{file}.log",
            crash=f"{site.run_dir}/crash/{file}.txt",
            env=dict(command.spec.env),
            python=command.spec.python,
            oom_score_adj=command.spec.oom_score_adj,
            devices=command.spec.devices,
        )

    def _stop(self, command: commands.Stop) -> None:
        key = command.name, command.incarnation
        self._told_to_stop.add(key)
        if key in self._ready:
            peer = f"{command.name}#{command.incarnation}".encode()
            self._courier.say(peer, wire.Stop(reason="its supervisor stops it"))
        else:  # still in its constructor: it owns nothing yet that it could clean up
            self._say_agent(wire.Kill(name=command.name, incarnation=command.incarnation))

    def _fire(self, timer: str) -> None:
        if self._timers.pop(timer, None) is not None:
            self.handle(events.TimerFired(timer=timer))

    def _report(self, report: commands.Report) -> None:
        root_is_up = report.kind is commands.ReportKind.SUPERVISOR_READY
        if root_is_up and report.fields.get("supervisor") == self._policy.root_id:
            self.is_ready = True
        self._events.emit(report.kind.value, **report.fields)

    def _log_path(self, name: str, incarnation: int) -> Path:
        return Path(self._config.run_dir) / "logs" / f"{name.replace('/', '-')}-{incarnation}.log"

    def _crash_path(self, name: str, incarnation: int) -> Path:
        return Path(self._config.run_dir) / "crash" / f"{name.replace('/', '-')}-{incarnation}"


def target_of(actor: type | str) -> str:
    """Name an actor class so that another process finds it: `module:Class`, or `path.py:Class`.

    Raises:
        TypeError: a class made inside a function, which no other process can find.
    """
    if isinstance(actor, str):
        return actor
    if "<locals>" in actor.__qualname__:
        raise TypeError(f"{actor.__qualname__} is defined inside a function; move it to its module")
    if actor.__module__ in {"__main__", "__relax_main__"}:
        return f"{Path(inspect.getfile(sys.modules[actor.__module__])).resolve()}:{actor.__qualname__}"
    return f"{actor.__module__}:{actor.__qualname__}"


def _key_of(peer: bytes) -> Key:
    name, _, incarnation = peer.decode(errors="replace").rpartition("#")
    return name, int(incarnation) if incarnation.isdecimal() else 0


def _outline(node: NodeStatus) -> dict[str, Any]:
    """Return who is below whom, in the order of the spec."""
    if not node.is_supervisor:
        return {"name": node.name}
    return {"name": node.name, "children": [_outline(child) for child in node.children]}


def _last_line(text: str) -> str:
    lines = text.rstrip().splitlines()
    return lines[-1][:400] if lines else ""
