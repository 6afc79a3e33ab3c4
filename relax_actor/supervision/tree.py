"""The thin shell round `policy.TreePolicy`: facts in, commands out, in the courier's loop thread.

It holds no opinion: the policy decides what is started, stopped and restarted; `executor` gives the orders,
and the node agents do it. What the shell adds is telling every actor who is up and who is gone
(`directory`), and writing it all down (`chronicle`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.actor.ref import Ref
from relax_actor.actor.wire import NodeConfig, PeerGone, Record
from relax_actor.supervision import commands, events
from relax_actor.supervision.chronicle import Chronicle
from relax_actor.supervision.classify import classify, last_line
from relax_actor.supervision.directory import Directory
from relax_actor.supervision.executor import Executor
from relax_actor.supervision.fleet import Fleet
from relax_actor.supervision.homeless import Homeless
from relax_actor.supervision.hook import Hook, HookRunner
from relax_actor.supervision.monitor import MonitorHub, Phase
from relax_actor.supervision.orders import Orders
from relax_actor.supervision.policy import TreePolicy
from relax_actor.supervision.roster import ReadyWord, Roster
from relax_actor.supervision.sights import Sights
from relax_actor.supervision.site import Key
from relax_actor.telemetry import EventLog
from transport.control import Frames

log = logging.getLogger(__name__)


class TreeShell:
    """Takes one tree's facts. Every method runs in the courier's loop thread.

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
        self._chronicle, self._on_change = Chronicle(config, fleet, events_log), on_change
        self._courier: Courier
        self._sights: Sights
        self._directory: Directory
        self._executor: Executor
        self._roster = Roster()
        self._orders = Orders(policy, self.handle)
        self._hook = HookRunner(hook, self._ref, self._hook_answered) if hook else None
        self.monitors = MonitorHub()
        self.finished: commands.Finished | None = None
        self.is_ready = False
        self.homeless = Homeless()

    def start(self, courier: Courier) -> None:
        """Start the node agents; the tree starts when all have joined."""
        self._courier = courier
        self._directory = Directory(courier, self._fleet.host_of)
        self._sights = Sights(self._fleet.ask_host, courier.say)
        self._executor = Executor(
            courier,
            self.handle,
            fleet=self._fleet,
            roster=self._roster,
            directory=self._directory,
            chronicle=self._chronicle,
            monitors=self.monitors,
            homeless=self.homeless,
        )
        self._chronicle.tree("tree_started", self._policy.snapshot())
        self._fleet.start(self, courier)

    def handle(self, event: events.Event) -> None:
        """Give the policy a fact and carry out what it decides.

        Raises:
            SpecError: a change that cannot be; nothing is changed.
        """
        if isinstance(event, events.Scale) and (spec := self._policy.replicas(event.child).spec) is not None:
            self._fleet.check_room(spec, event.replicas)
        for command in self._policy.handle(event, time.monotonic()):
            self._carry_out(command)
        if isinstance(event, events.AddChild | events.RemoveChild | events.Scale):
            self._chronicle.tree("tree_changed", self._policy.snapshot())
        self._on_change()

    def pid(self, name: str) -> int | None:
        """Return the pid of the incarnation that is there, if any."""
        return self._roster.pid(name)

    def close(self) -> None:
        """End the node agent and everything on it."""
        if self._hook is not None:
            self._hook.close()
        self.monitors.close()
        self._fleet.close()
        self._chronicle.close()

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
            case wire.Hung():
                self._hung(record)
            case wire.Seen():
                self._sights.answered(record)
            case _:
                log.warning("unexpected %s from a node agent", type(record).__name__)

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
                self._directory.hello(peer, self._roster.as_spare((record.name, record.incarnation)))
            case wire.Ready() | wire.SpareReady():
                if not self._roster.is_ahead(record):
                    self._is_ready(record)
            case _:
                self._heard_of_work(peer, record)

    def _heard_of_work(self, peer: bytes, record: Record) -> None:
        match record:
            case wire.Look():
                self._sights.ask(peer, record)
            case wire.Order():
                self._courier.say(peer, self._orders.take(record))
            case wire.Meeting():
                self._executor.meetings.opened(record)
            case wire.Released():
                name, incarnation, epoch = record.name, record.incarnation, record.epoch
                self.handle(events.Released(name=name, incarnation=incarnation, epoch=epoch))
            case _:
                log.warning("unexpected %s from %s", type(record).__name__, peer.decode(errors="replace"))

    def _spawned(self, record: wire.Spawned) -> None:
        word = self._roster.spawned(record)
        self.monitors.note(Phase.UP, record.name, record.incarnation)
        self._fleet.spawned((record.name, record.incarnation), record.pid)
        self._chronicle.spawned(record)
        if word is not None:
            self._is_ready(word)

    def _is_ready(self, record: ReadyWord) -> None:
        if isinstance(record, wire.SpareReady):
            self.handle(events.SpareReady(name=record.name))
            return
        key = record.name, record.incarnation
        if key not in self._roster.dying:  # else its agent's word was quicker, and nobody is to call it
            self._directory.ready(record)
        self._was_ready(key)

    def _was_ready(self, key: Key) -> None:
        if key not in self._roster.ready:
            self._roster.ready.add(key)
            self.monitors.note(Phase.READY, *key)
            self.handle(events.Ready(name=key[0], incarnation=key[1]))

    def _dying(self, record: wire.Dying) -> None:
        """Fail the calls it had; its restart waits for the kernel's word that it is gone."""
        name, incarnation = self._roster.name_of(record.name, record.incarnation)
        record = msgspec.structs.replace(record, name=name, incarnation=incarnation)
        self._roster.dying.add((name, incarnation))
        self._directory.dying(record)
        self._chronicle.dying(record)
        self.monitors.note(Phase.DYING, name, incarnation)
        self.handle(events.Dying(name=name, incarnation=incarnation))

    def _exited(self, record: wire.Exited) -> None:
        key = self._roster.name_of(record.name, record.incarnation)
        if record.was_ready:  # its own word was lost with it, or comes later
            self._was_ready(key)
        if record.error and key not in self._roster.ready:
            error = last_line(record.error)
            self.handle(events.InitFailed(name=key[0], incarnation=key[1], error=error))
        if (spare := self._roster.as_spare(key)) is not None:
            self._chronicle.was_spare(spare, key)
        how = classify(record, was_told=key in self._roster.told_to_stop)
        self._gone(*key, how, record.doing, record.last)

    def _gone(self, name: str, incarnation: int, how: events.Exit, doing: str = "", last: str = "") -> None:
        lag_s = self._fleet.lag_s((name, incarnation))
        self.homeless.settle(name)
        pid = self._roster.gone((name, incarnation))
        self._fleet.gone((name, incarnation))
        self._directory.gone(PeerGone(name=name, incarnation=incarnation, reason=str(how)))
        self._chronicle.gone((name, incarnation), pid, how, doing=doing, last=last, lag_s=lag_s)
        self.monitors.note(Phase.GONE, name, incarnation, how)
        self.handle(events.Gone(name=name, incarnation=incarnation, exit=how))

    # -- hangs and failures ---------------------------------------------------------------------

    def _hung(self, record: wire.Hung) -> None:
        name, incarnation = self._roster.name_of(record.name, record.incarnation)
        hung = events.Exit(kind=events.ExitKind.HANG, detail=record.why)
        self.handle(events.Failed(name=name, incarnation=incarnation, exit=hung))

    def _ref(self, name: str) -> Ref[Any]:
        return Ref(name, self._courier.caller)

    def _hook_answered(self, decided: events.Decided) -> None:
        self._courier.run_soon(self.handle, decided)

    # -- commands -------------------------------------------------------------------------------

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.Report():
                self._report(command)
            case commands.Consult():
                if self._hook is not None:
                    self._hook.ask(command)
            case commands.Finished():
                self.finished = command
            case _:
                self._executor.carry_out(command)

    def _report(self, report: commands.Report) -> None:
        root_is_up = report.kind is commands.ReportKind.SUPERVISOR_READY
        if root_is_up and report.fields.get("supervisor") == self._policy.root_id:
            self.is_ready = True
        if report.kind is commands.ReportKind.CHILD_REMOVED:
            self._chronicle.tree("tree_changed", self._policy.snapshot())
        self._chronicle.note(report.kind.value, report.fields)
