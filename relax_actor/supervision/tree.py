"""The thin shell round `policy.TreePolicy`: facts in, commands out, in the courier's loop thread.

It holds no opinion: the policy decides what is started, stopped and restarted; the node agent does it.
What the shell adds is telling every actor who is up and who is gone, and writing the event log.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.actor.ref import Ref
from relax_actor.actor.wire import NodeConfig, PeerGone, PeerUp, Record
from relax_actor.ids import Holder
from relax_actor.node import process
from relax_actor.supervision import commands, events
from relax_actor.supervision.births import rename_files, spawn_record
from relax_actor.supervision.classify import classify, last_line
from relax_actor.supervision.crash import CrashGatherer, Death
from relax_actor.supervision.fleet import Fleet, Key, Place
from relax_actor.supervision.hangs import HangWatch
from relax_actor.supervision.hook import Hook, HookRunner
from relax_actor.supervision.monitor import MonitorHub, Phase
from relax_actor.supervision.policy import NodeStatus, TreePolicy
from relax_actor.supervision.spec import ChildSpec
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
        hook: decides what follows from failures, if the user gave one.
    """

    def __init__(  # noqa: PLR0917 - the supervisor makes one, once
        self,
        policy: TreePolicy,
        fleet: Fleet,
        config: NodeConfig,
        events_log: EventLog,
        on_change: Callable[[], None],
        hook: Hook | None = None,
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
        self._promoted: dict[tuple[str, int], str] = {}  # to the name it had as a spare
        self._hangs = HangWatch(self._hung)
        self._hook = HookRunner(hook, self._ref, self._hook_answered) if hook else None
        self.monitors = MonitorHub()
        self._crashes = CrashGatherer()
        self.finished: commands.Finished | None = None
        self.is_ready = False

    def start(self, courier: Courier) -> None:
        """Start the node agents; the tree starts when all have joined."""
        self._courier = courier
        self._hangs.start(courier.loop)
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
        if self._hook is not None:
            self._hook.close()
        self.monitors.close()
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
                self._listeners.discard(
                    _identity(self._promoted.get((record.name, record.incarnation), ""), 1)
                )
                for name in self._up:
                    self._courier.say(peer, self._seen_by(_key_of(peer), name))
            case wire.Ready():
                self._actor_ready(record)
            case _:
                self._heard_of_work(peer, record)

    def _heard_of_work(self, peer: bytes, record: Record) -> None:
        match record:
            case wire.SpareReady():
                self.handle(events.SpareReady(name=record.name))
            case wire.Began() | wire.Ended() | wire.Beat():
                self._hangs.heard(record)
            case wire.Released():
                name, incarnation, epoch = record.name, record.incarnation, record.epoch
                self.handle(events.Released(name=name, incarnation=incarnation, epoch=epoch))
            case _:
                log.warning("unexpected %s from %s", type(record).__name__, peer.decode(errors="replace"))

    def _spawned(self, record: wire.Spawned) -> None:
        self._pids[record.name, record.incarnation] = record.pid
        self.monitors.note(Phase.UP, record.name, record.incarnation)
        self._fleet.spawned((record.name, record.incarnation), record.pid)
        self._emit_spawned(record.name, record.incarnation, record.pid)

    def _emit_spawned(self, name: str, incarnation: int, pid: int) -> None:
        self._events.emit(
            "child_spawned",
            child=name,
            incarnation=incarnation,
            pid=pid,
            start_ticks=process.start_time(pid),
            log=str(self._log_path(name, incarnation)),
        )

    def _actor_ready(self, record: wire.Ready) -> None:
        key = record.name, record.incarnation
        self._ready.add(key)
        self._up[record.name] = record
        self._courier.peer_up(self._seen_by(None, record.name))
        for peer in self._listeners:
            self._courier.say(peer, self._seen_by(_key_of(peer), record.name))
        self.monitors.note(Phase.READY, *key)
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
        name, incarnation = self._name_of(record.name, record.incarnation)
        record = msgspec.structs.replace(record, name=name, incarnation=incarnation)
        if (up := self._up.get(name)) is not None and up.incarnation == incarnation:
            del self._up[name]
        self._listeners.discard(_identity(name, incarnation))
        self._courier.peer_dying(record)
        self._broadcast(record)
        self._events.emit("child_dying", child=name, incarnation=incarnation, reason=record.reason)
        self.monitors.note(Phase.DYING, name, incarnation)
        self.handle(events.Dying(name=name, incarnation=incarnation))

    def _exited(self, record: wire.Exited) -> None:
        key = self._name_of(record.name, record.incarnation)
        if record.error and key not in self._ready:
            error = last_line(record.error)
            self.handle(events.InitFailed(name=key[0], incarnation=key[1], error=error))
        told = key in self._told_to_stop
        if (spare := self._promoted.get(key)) is not None:
            rename_files(self._crash_path(spare, 1), self._crash_path(*key), (".txt", ".json"))
        how = classify(record, was_told=told)
        self._gone(*key, how)

    def _name_of(self, name: str, incarnation: int) -> tuple[str, int]:
        """Return who a process is that the agent may still know as a spare."""
        names = (key for key, spare in self._promoted.items() if (spare, 1) == (name, incarnation))
        return next(names, (name, incarnation))

    def _gone(self, name: str, incarnation: int, how: events.Exit) -> None:
        pid = self._pids.pop((name, incarnation), 0)
        self._fleet.gone((name, incarnation))
        self._near.pop((name, incarnation), None)
        self._hangs.forget((name, incarnation))
        self._promoted.pop((name, incarnation), None)
        self._listeners.discard(_identity(name, incarnation))
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
        self.monitors.note(Phase.GONE, name, incarnation, how)
        self.handle(events.Gone(name=name, incarnation=incarnation, exit=how))

    def _broadcast(self, record: Record) -> None:
        for listener in self._listeners:
            self._courier.say(listener, record)

    # -- hangs and failures ---------------------------------------------------------------------

    def _hung(self, key: Key, why: str) -> None:
        hung = events.Exit(kind=events.ExitKind.HANG, detail=why)
        self.handle(events.Failed(name=key[0], incarnation=key[1], exit=hung))

    def _ref(self, name: str) -> Ref[Any]:
        return Ref(name, self._courier.caller)

    def _hook_answered(self, decided: events.Decided) -> None:
        self._courier.run_soon(self.handle, decided)

    # -- commands -------------------------------------------------------------------------------

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.Spawn() | commands.SpawnSpare() | commands.Promote():
                self._bring_up(command)
            case commands.Stop():
                self._stop(command)
            case commands.Kill():
                self._say_agent(wire.Kill(name=command.name, incarnation=command.incarnation))
            case commands.GangAbort() | commands.Regroup():
                self._order_rank(command)
            case commands.SetTimer() | commands.CancelTimer():
                self._set_timer(command)
            case commands.Report():
                self._report(command)
            case commands.Consult() if self._hook is not None:
                self._hook.ask(command)
            case commands.Finished():
                self.finished = command

    def _bring_up(self, command: commands.Spawn | commands.SpawnSpare | commands.Promote) -> None:
        match command:
            case commands.Spawn():
                self._spawn((command.name, command.incarnation), command.spec, command.replica)
            case commands.SpawnSpare():
                self._spawn((command.name, 1), command.spec, 0, is_spare=True)
            case _:
                self._promote(command)

    def _spawn(self, key: Key, spec: ChildSpec, replica: int, *, is_spare: bool = False) -> None:
        arguments = codec.pack(spec.args)
        self._fleet.place(key, spec.hosts, replica)
        self._hangs.watch(key, spec.hang_after_s)

        def spawn(site: Place) -> None:
            record = spawn_record(key, spec, site, is_spare=is_spare)
            self._near[key] = record.address
            self._fleet.say(key, record, arguments)

        self._fleet.when_joined(key, spawn)

    def _promote(self, command: commands.Promote) -> None:
        spare, key = (command.spare, 1), (command.name, command.incarnation)
        self._promoted[key] = command.spare
        self._pids[key] = self._pids.pop(spare, 0)
        self._near[key] = self._near.pop(spare, "")
        self._fleet.renamed(spare, key)
        self._hangs.forget(spare)
        self._hangs.watch(key, command.spec.hang_after_s)
        rename_files(self._log_path(*spare), self._log_path(*key), (".log",))
        self._emit_spawned(*key, self._pids[key])
        record = wire.Promote(spare=command.spare, name=command.name, incarnation=command.incarnation)
        self._fleet.say(key, record)
        self._courier.say(_identity(*spare), record)
        self.monitors.note(Phase.UP, *key)

    def _order_rank(self, command: commands.GangAbort | commands.Regroup) -> None:
        peer = _identity(command.name, command.incarnation)
        if isinstance(command, commands.GangAbort):
            self._courier.say(peer, wire.GangAbort(epoch=command.epoch, reason=command.reason))
        else:
            self._courier.say(peer, self._group_of(command))

    def _group_of(self, command: commands.Regroup) -> wire.Regroup:
        folder = Path(self._config.run_dir) / "gang"
        folder.mkdir(exist_ok=True)
        return wire.Regroup(
            epoch=command.epoch,
            rank=command.rank,
            size=command.size,
            rendezvous=f"file://{folder}/{command.gang}-{command.epoch}",
        )

    def _stop(self, command: commands.Stop) -> None:
        key = command.name, command.incarnation
        self._told_to_stop.add(key)
        if key in self._ready:
            self._courier.say(_identity(*key), wire.Stop(reason="its supervisor stops it"))
        else:  # still in its constructor: it owns nothing yet that it could clean up
            self._say_agent(wire.Kill(name=command.name, incarnation=command.incarnation))

    def _set_timer(self, command: commands.SetTimer | commands.CancelTimer) -> None:
        name = command.timer
        if isinstance(command, commands.SetTimer):
            self._timers[name] = self._courier.loop.call_later(command.delay_s, self._fire, name)
        elif (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

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


def _key_of(peer: bytes) -> Key:
    name, _, incarnation = peer.decode(errors="replace").rpartition("#")
    return name, int(incarnation) if incarnation.isdecimal() else 0


def _identity(name: str, incarnation: int) -> bytes:
    return str(Holder(name, incarnation)).encode()


def _outline(node: NodeStatus) -> dict[str, Any]:
    """Return who is below whom, in the order of the spec."""
    if not node.is_supervisor:
        return {"name": node.name}
    return {"name": node.name, "children": [_outline(child) for child in node.children]}
