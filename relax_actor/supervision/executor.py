"""What commands of the policy mean for processes: who is started, stopped, or told to meet again, and when.

The other way round, facts come in by `tree`.
"""

import asyncio
from collections.abc import Callable

from relax_actor.actor import wire
from relax_actor.actor.courier import Courier
from relax_actor.supervision import commands, events
from relax_actor.supervision.births import spawn_record
from relax_actor.supervision.chronicle import Chronicle
from relax_actor.supervision.directory import Directory, identity_of
from relax_actor.supervision.fleet import Fleet
from relax_actor.supervision.homeless import Homeless
from relax_actor.supervision.meetings import Meetings
from relax_actor.supervision.monitor import MonitorHub, Phase
from relax_actor.supervision.roster import Roster
from relax_actor.supervision.site import Key, Place
from relax_actor.supervision.spec import ChildSpec
from transport import codec

Birth = commands.Spawn | commands.SpawnSpare | commands.Promote
Deed = (
    Birth
    | commands.Stop
    | commands.Kill
    | commands.GangAbort
    | commands.Regroup
    | commands.SetTimer
    | commands.CancelTimer
)


class Executor:
    """Carries out one tree's commands. Every method runs in the courier's loop thread.

    Args:
        courier: brings orders to agents and actors.
        decide: gives the policy a fact.
        fleet: the hosts.
        roster: knows how far each incarnation has come.
        directory: knows where each takes calls.
        chronicle: writes promotions down.
        monitors: hear of promotions.
        homeless: knows who waits for a host.

    Attributes:
        meetings: the epochs of gangs that are still to meet.
    """

    def __init__(
        self,
        courier: Courier,
        decide: Callable[[events.Event], None],
        *,
        fleet: Fleet,
        roster: Roster,
        directory: Directory,
        chronicle: Chronicle,
        monitors: MonitorHub,
        homeless: Homeless,
    ) -> None:
        self._courier, self._decide = courier, decide
        self._fleet, self._roster, self._directory = fleet, roster, directory
        self._chronicle, self._monitors, self._homeless = chronicle, monitors, homeless
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.meetings = Meetings(lambda key, record: courier.say(identity_of(*key), record))

    def carry_out(self, command: Deed) -> None:
        """Do what the policy wants done of actors, or at a time."""
        match command:
            case commands.Spawn() | commands.SpawnSpare() | commands.Promote():
                self._bring_up(command)
            case commands.Stop():
                self._stop(command)
            case commands.Kill():
                self._kill((command.name, command.incarnation))
            case commands.GangAbort():
                self._abort(command)
            case commands.Regroup():
                self.meetings.regroup(command)
            case commands.SetTimer() | commands.CancelTimer():
                self._set_timer(command)

    def _bring_up(self, command: Birth) -> None:
        match command:
            case commands.Spawn():
                self._spawn((command.name, command.incarnation), command.spec, command.replica)
            case commands.SpawnSpare():
                self._spawn((command.name, 1), command.spec, 0, is_spare=True)
            case _:
                self._promote(command)

    def _spawn(self, key: Key, spec: ChildSpec, replica: int, *, is_spare: bool = False) -> None:
        arguments = codec.pack(spec.args)
        home = self._fleet.place(key, spec, replica)

        def spawn(site: Place) -> None:
            record = spawn_record(key, spec, home, site, is_spare=is_spare)
            self._directory.placed(key, record.address)
            self._fleet.say(key, record, arguments)
            self._found_host(key)

        if absence := self._fleet.absence(home.host):
            self._homeless.wait(key[0], home.host, absence)
            waits = events.AwaitsHost(name=key[0], incarnation=key[1], host=home.host)
            self._courier.loop.call_soon(self._decide, waits)
        self._fleet.when_joined(key, spawn)

    def _found_host(self, key: Key) -> None:
        if self._homeless.settle(key[0]):
            self._courier.loop.call_soon(self._decide, events.HostFound(name=key[0], incarnation=key[1]))

    def _promote(self, command: commands.Promote) -> None:
        spare, key = (command.spare, 1), (command.name, command.incarnation)
        born = self._roster.promoted(spare, key)
        self._directory.renamed(spare, key)
        self._fleet.renamed(spare, key)
        self._chronicle.promoted(spare, born)
        record = wire.Promote(spare=command.spare, name=command.name, incarnation=command.incarnation)
        self._fleet.say(key, record)
        self._courier.say(identity_of(*spare), record)
        self._monitors.note(Phase.UP, *key)

    def _stop(self, command: commands.Stop) -> None:
        key = command.name, command.incarnation
        self._roster.told_to_stop.add(key)
        if key in self._roster.ready:
            why = "it leaves" if command.drain_s else "its supervisor stops it"
            self._courier.say(identity_of(*key), wire.Stop(reason=why, drain_s=command.drain_s))
        else:  # still in its constructor: it owns nothing yet that it could clean up
            self._kill(key)

    def _kill(self, key: Key) -> None:
        self._fleet.say(key, wire.Kill(name=key[0], incarnation=key[1]))

    def _abort(self, command: commands.GangAbort) -> None:
        self.meetings.abort(command)
        order = wire.GangAbort(epoch=command.epoch, reason=command.reason)
        self._courier.say(identity_of(command.name, command.incarnation), order)

    def _set_timer(self, command: commands.SetTimer | commands.CancelTimer) -> None:
        name = command.timer
        if isinstance(command, commands.SetTimer):
            self._timers[name] = self._courier.loop.call_later(command.delay_s, self._fire, name)
        elif (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _fire(self, timer: str) -> None:
        if self._timers.pop(timer, None) is not None:
            self._decide(events.TimerFired(timer=timer))
