"""The policy against every order of events Hypothesis can think of, in trees it makes up itself.

The model beside it knows only what a person would check by hand: who lives, who was told to stop, how often
each supervisor restarted something lately. It shares no code and no state with the policy.
"""

import random
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_actor.supervision.commands import (
    CancelTimer,
    Consult,
    Finished,
    GangAbort,
    Kill,
    Promote,
    Regroup,
    Report,
    ReportKind,
    SetTimer,
    Spawn,
    SpawnSpare,
    Stop,
)
from relax_actor.supervision.events import (
    AddChild,
    Decided,
    Decision,
    Dying,
    Exit,
    ExitKind,
    Failed,
    Gone,
    InitFailed,
    KillRequested,
    LinkAdded,
    Ready,
    Released,
    RemoveChild,
    SpareReady,
    StartAll,
    StopRequested,
    TimerFired,
)
from relax_actor.supervision.policy import TreePolicy
from relax_actor.supervision.spec import (
    Backoff,
    ChildSpec,
    Intensity,
    RestartType,
    Strategy,
    SupervisorSpec,
    actor_names,
)

ENDED_OR_READY = {"ready", "ended"}
ANY_EXIT = st.sampled_from(ExitKind).map(lambda kind: Exit(kind=kind))


@st.composite
def trees(draw: st.DrawFn, name: str = "s", depth: int = 2) -> SupervisorSpec:
    auto_shutdown = draw(st.sampled_from(("never", "never", "any", "all")))
    is_nested = st.sampled_from((False, True) if depth else (False,))
    kinds = draw(st.lists(is_nested, min_size=1, max_size=3))
    children = tuple(
        draw(trees(f"{name}{index}", depth - 1) if nested else children_of(f"{name}{index}", auto_shutdown))
        for index, nested in enumerate(kinds)
    )
    return SupervisorSpec(
        id=name,
        children=children,
        strategy=draw(st.sampled_from(Strategy)),
        intensity=Intensity(restarts=draw(st.integers(0, 4)), within_s=30.0),
        backoff=Backoff(base_s=1.0, cap_s=8.0, reset_after_s=20.0),
        auto_shutdown=auto_shutdown,
    )


@st.composite
def children_of(draw: st.DrawFn, name: str, auto_shutdown: str) -> ChildSpec:
    restart = draw(st.sampled_from(RestartType))
    can_be_significant = auto_shutdown != "never" and restart is not RestartType.PERMANENT
    return ChildSpec(
        id=name,
        actor="roles:Any",
        replicas=draw(st.integers(1, 3)),
        restart=restart,
        shutdown_s=draw(st.sampled_from((0.0, 5.0))),
        start_timeout_s=10.0,
        significant=can_be_significant and draw(st.booleans()),
        spares=draw(st.sampled_from((0, 0, 1, 2))),
        gang=restart is not RestartType.TEMPORARY and draw(st.booleans()),
    )


class Process:
    """What the kernel knows of one incarnation."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.is_ready = self.is_told = self.has_raised = self.has_failed = self.is_dying = False
        self.aborting = self.epoch = 0


class TreeMachine(RuleBasedStateMachine):
    """One run of one tree, from its start to its end."""

    @initialize(
        spec=trees(),
        seed=st.integers(0, 9),
        consult_s=st.sampled_from((None, 3.0)),
        stop_total_s=st.sampled_from((None, 7.0)),
    )
    def start(
        self, spec: SupervisorSpec, seed: int, consult_s: float | None, stop_total_s: float | None
    ) -> None:
        self.policy = TreePolicy(spec, random.Random(seed), consult_s=consult_s, stop_total_s=stop_total_s)
        self.spares: dict[str, bool] = {}  # and whether it is ready
        self.dying_spares: set[str] = set()
        self.questions: list[Consult] = []
        self.asked: set[tuple[str, int]] = set()
        self.epochs: dict[str, int] = defaultdict(int)
        self.gangs: dict[str, str] = {}  # rank to gang
        self.is_overdue = False
        self.lost_hosts: dict[str, float] = {}  # supervisor to when it last counted a lost host
        self.now = 0.0
        self.alive: dict[str, Process] = {}
        self.incarnations: dict[str, int] = defaultdict(int)
        self.timers: dict[str, float] = {}
        self.used_timers: set[str] = set()
        self.finished: list[Finished] = []
        self.stop_requested = self.kill_requested = False
        self.restarts: dict[str, list[float]] = defaultdict(list)
        self.parents: dict[str, SupervisorSpec] = {}
        self.slots: dict[str, int] = {}  # actor to position, replicas sharing one
        self.below: dict[str, set[str]] = defaultdict(set)  # child or supervisor to its actors
        self.coming_down: set[str] = set()  # actors on the way down before a stop was asked for
        self.permanent: set[str] = set()  # who must be up whenever all is quiet
        self.added = 0
        self._learn(spec)
        self.root = spec
        self.send(StartAll())

    # -- what may happen ----------------------------------------------------------------------------

    @precondition(lambda self: any(not process.is_ready for process in self.alive.values()))
    @rule(pick=st.randoms(use_true_random=False))
    def becomes_ready(self, pick: random.Random) -> None:
        process = pick.choice([process for process in self.alive.values() if not process.is_ready])
        if not process.has_raised:
            self._become_ready(process)

    @precondition(lambda self: any(not process.is_ready for process in self.alive.values()))
    @rule(pick=st.randoms(use_true_random=False), error=st.sampled_from(("ValueError: x", "KeyError: y")))
    def raises_in_init(self, pick: random.Random, error: str) -> None:
        process = pick.choice([process for process in self.alive.values() if not process.is_ready])
        if not process.has_raised:
            process.has_raised = True
            self.send(InitFailed(name=process.name, incarnation=process.incarnation, error=error))

    @precondition(lambda self: self.alive)
    @rule(pick=st.randoms(use_true_random=False), exit_=ANY_EXIT)
    def dies(self, pick: random.Random, exit_: Exit) -> None:
        self._die(pick.choice(list(self.alive.values())), exit_)

    @precondition(lambda self: self.timers)
    @rule()
    def next_timer_fires(self) -> None:
        timer = min(self.timers, key=self.timers.__getitem__)
        self.now = max(self.now, self.timers.pop(timer))
        self.send(TimerFired(timer=timer))

    @rule(seconds=st.sampled_from((0.1, 5.0, 31.0)))
    def time_passes(self, seconds: float) -> None:
        self.now = min([self.now + seconds, *self.timers.values()])

    @rule(pick=st.randoms(use_true_random=False))
    def an_old_story_is_heard(self, pick: random.Random) -> None:
        name = pick.choice([*self.incarnations, "nobody"])
        incarnation = self.incarnations.get(name, 0) - (name in self.alive)
        exit_ = Exit(kind=ExitKind.SIGNAL, signal=9)
        before = self.policy.snapshot()
        self.send(Gone(name=name, incarnation=incarnation, exit=exit_))
        self.send(TimerFired(timer=pick.choice([*(self.used_timers - self.timers.keys()), "none"])))
        assert self.policy.snapshot() == before

    @precondition(lambda self: not self.finished)
    @rule(replicas=st.integers(1, 2), restart=st.sampled_from(RestartType))
    def a_child_is_added(self, replicas: int, restart: RestartType) -> None:
        self.added += 1
        spec = ChildSpec(id=f"d{self.added}", actor="roles:Any", replicas=replicas, restart=restart)
        self._learn_child(spec, self.root)
        self.send(AddChild(supervisor=self.root.id, spec=spec))

    @precondition(lambda self: self.alive and not self.finished)
    @rule(pick=st.randoms(use_true_random=False))
    def a_child_is_removed(self, pick: random.Random) -> None:
        name = pick.choice(list(self.alive))
        ranks = [rank for rank, gang in self.gangs.items() if gang == self.gangs.get(name)]
        self.permanent.difference_update([name, *ranks])
        self.send(RemoveChild(name=self.gangs.get(name, name)))

    @precondition(lambda self: self.alive)
    @rule(pick=st.randoms(use_true_random=False), kind=st.sampled_from((ExitKind.HANG, ExitKind.OOM)))
    def is_seen_to_fail(self, pick: random.Random, kind: ExitKind) -> None:
        process = pick.choice(list(self.alive.values()))
        process.has_failed = True
        self.send(Failed(name=process.name, incarnation=process.incarnation, exit=Exit(kind=kind)))
        assert process.is_told

    @precondition(lambda self: self.alive)
    @rule(pick=st.randoms(use_true_random=False))
    def is_dying(self, pick: random.Random) -> None:
        process = pick.choice(list(self.alive.values()))
        process.is_dying = True
        self.send(Dying(name=process.name, incarnation=process.incarnation))

    @precondition(lambda self: any(process.aborting for process in self.alive.values()))
    @rule(pick=st.randoms(use_true_random=False))
    def leaves_its_collective(self, pick: random.Random) -> None:
        self._release(pick.choice([process for process in self.alive.values() if process.aborting]))

    @precondition(lambda self: self.questions)
    @rule(decision=st.sampled_from((None, *Decision)))
    def the_hook_answers(self, decision: Decision | None) -> None:
        question = self.questions.pop()
        if decision is Decision.IGNORE:
            self.permanent.discard(question.name)
        self.send(Decided(name=question.name, incarnation=question.incarnation, decision=decision))

    @precondition(lambda self: self.spares)
    @rule(pick=st.randoms(use_true_random=False))
    def a_spare_is_ready(self, pick: random.Random) -> None:
        self._make_spare_ready(pick.choice(list(self.spares)))

    @precondition(lambda self: self.spares)
    @rule(pick=st.randoms(use_true_random=False))
    def a_spare_is_lost(self, pick: random.Random) -> None:
        self._lose_spare(pick.choice(list(self.spares)))

    @precondition(lambda self: len(self.alive) > 1)
    @rule(pick=st.randoms(use_true_random=False))
    def two_are_linked(self, pick: random.Random) -> None:
        a, b = pick.sample(list(self.alive), 2)
        self.send(LinkAdded(a=a, b=b))

    @rule()
    def all_goes_quiet(self) -> None:
        """Everything still under way comes to its end: the tree must then be up, or over."""
        for _ in range(500):
            if not self._let_something_happen():
                break
        else:
            raise AssertionError("it never comes to rest")
        if not self.finished:
            self._check_rest()

    @rule()
    @precondition(lambda self: not self.stop_requested)
    def a_stop_is_asked_for(self) -> None:
        self.stop_requested = True
        self.send(StopRequested(reason="SIGINT"))

    @rule()
    @precondition(lambda self: self.stop_requested)
    def a_kill_is_asked_for(self) -> None:
        self.kill_requested = True
        self.send(KillRequested(reason="SIGINT"))
        assert all(process.is_told for process in self.alive.values())

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            self.all_goes_quiet()
            self.stop_requested = True
            self.send(StopRequested(reason="the end"))
            self.all_goes_quiet()
            assert len(self.finished) == 1

    @invariant()
    def the_policy_sees_the_same_world(self) -> None:
        if hasattr(self, "policy"):
            starting = {"starting", "ready", "stopping"}
            seen = {status.name for status in _leaves(self.policy.snapshot()) if status.state in starting}
            assert seen == self.alive.keys()
            spares = {name for status in _all(self.policy.snapshot()) for name in status.spares}
            assert self.finished or spares == self.spares.keys()

    @invariant()
    def ranks_that_met_met_under_one_epoch(self) -> None:
        if hasattr(self, "policy"):
            for process in self.alive.values():
                gang = self.gangs.get(process.name)
                assert gang is None or process.epoch <= self.epochs[gang]

    # -- what the policy orders -----------------------------------------------------------------------

    def send(self, event) -> None:
        for command in self.policy.handle(event, self.now):
            assert not self.finished, "something is ordered after the end"
            self._obey(command)

    def _obey(self, command) -> None:  # noqa: C901 - one case a command
        match command:
            case Spawn():
                self._spawn(command)
            case SpawnSpare():
                assert not self.stop_requested
                assert command.name not in self.spares
                self.spares[command.name] = False
            case Promote():
                assert self.spares.pop(command.spare), "a spare takes over before it is ready"
                assert command.spare not in self.dying_spares
                self._spawn(command)
            case Kill() if command.name in self.spares:
                assert command.name not in self.dying_spares
                self.dying_spares.add(command.name)
            case GangAbort() | Regroup():
                self._order_rank(command)
            case Consult():
                assert (command.name, command.incarnation) not in self.asked, "asked twice"
                assert not command.exit.is_normal
                self.asked.add((command.name, command.incarnation))
                self.questions.append(command)
            case Stop():
                self._tell(command)
                process = self.alive[command.name]
                assert not process.is_told, "told to stop twice"
                process.is_told = True
            case Kill():
                self._tell(command)
                self.alive[command.name].is_told = True
            case SetTimer():
                assert command.timer not in self.used_timers
                self.used_timers.add(command.timer)
                self.timers[command.timer] = self.now + command.delay_s
            case CancelTimer():
                del self.timers[command.timer]
            case Report():
                self._note(command)
            case Finished():
                assert not self.alive
                assert not self.timers
                assert not self.spares
                self.finished.append(command)

    def _order_rank(self, command: GangAbort | Regroup) -> None:
        process = self.alive[command.name]
        assert (process.incarnation, process.is_ready) == (command.incarnation, True)
        gang = self.gangs[command.name]
        if isinstance(command, GangAbort):
            assert command.epoch == process.epoch == self.epochs[gang]
            process.aborting = command.epoch
            return
        assert not process.is_dying
        assert not process.aborting, "regrouped while it is in an aborted collective"
        assert command.epoch == self.epochs[gang] + (command.rank == 0 or self.epochs[gang] == 0)
        process.epoch = self.epochs[gang] = command.epoch
        met = [each for each in self.alive.values() if self.gangs.get(each.name) == gang]
        assert len(met) == command.size

    def _spawn(self, command: Spawn | Promote) -> None:
        assert command.name not in self.alive, "two incarnations at once"
        assert not self.stop_requested, "started after a stop was asked for"
        self.incarnations[command.name] += 1
        assert command.incarnation == self.incarnations[command.name]
        assert command.name == actor_names(command.spec)[command.replica]
        self.alive[command.name] = Process(command.name, command.incarnation)
        self.coming_down.discard(command.name)

    def _tell(self, command: Stop | Kill) -> None:
        process = self.alive[command.name]
        assert command.incarnation == process.incarnation
        is_told_in_turn = not process.is_told and command.name not in self.coming_down
        is_told_in_turn = is_told_in_turn and not (process.has_failed or process.aborting or self.is_overdue)
        if (
            self.stop_requested
            and is_told_in_turn
            and not (self.kill_requested and isinstance(command, Kill))
        ):
            later = [name for name in self.alive if self.slots[name] > self.slots[command.name]]
            assert not later, "stopped before those that started after it were gone"

    def _note(self, report: Report) -> None:
        fields = report.fields
        match report.kind:
            case ReportKind.CHILD_RESTARTING:
                self._forget_restarts(fields["child"], *fields["also"])
                self._count_restart(fields["child"], fields["reason"])
                self._note_coming_down(*fields["also"])
            case ReportKind.STOP_OVERDUE:
                self.is_overdue = True
            case ReportKind.ESCALATED | ReportKind.SUPERVISOR_STOPPING:
                self._note_coming_down(fields["supervisor"])
            case ReportKind.CHILD_REFUSED:
                self._note_coming_down(fields["child"])

    def _note_coming_down(self, *children: str) -> None:
        if not self.stop_requested:
            for child in children:
                self.coming_down |= self.below.get(child, {child})

    def _forget_restarts(self, *children: str) -> None:
        """Count anew in each supervisor that is restarted, and in those below it."""
        for child in children:
            for name in self.restarts.keys() & self._supervisors_within(child):
                del self.restarts[name]

    def _count_restart(self, child: str, reason: str) -> None:
        supervisor = self.parents[child]
        if reason == "host lost":
            since_s = self.now - self.lost_hosts.get(supervisor.id, -100.0)
            if since_s <= 1.0 and self.restarts[supervisor.id]:
                return
            self.lost_hosts[supervisor.id] = self.now
        times_s = self.restarts[supervisor.id]
        times_s.append(self.now)
        recent = [at_s for at_s in times_s if at_s >= self.now - supervisor.intensity.within_s]
        assert len(recent) <= supervisor.intensity.restarts

    def _supervisors_within(self, child: str) -> set[str]:
        below = [name for name, parent in self.parents.items() if parent.id == child]
        return {child, *(each for name in below for each in self._supervisors_within(name))}

    # -- what the model knows -------------------------------------------------------------------------

    def _learn(self, spec: SupervisorSpec, *above: SupervisorSpec) -> None:
        for child in spec.children:
            self.parents[child.id] = spec
            if isinstance(child, SupervisorSpec):
                self._learn(child, spec, *above)
            else:
                self._learn_child(child, spec, *above)
                if child.restart is RestartType.PERMANENT:
                    self.permanent.update(actor_names(child))

    def _learn_child(self, child: ChildSpec, parent: SupervisorSpec, *above: SupervisorSpec) -> None:
        names, position = actor_names(child), len(self.slots)
        for name in names:
            self.slots[name] = position
            if child.gang:
                self.gangs[name] = child.id
            self.parents[name] = parent
        for each in (child, parent, *above):
            self.below[each.id].update(names)

    def _become_ready(self, process: Process) -> None:
        process.is_ready = True
        self.send(Ready(name=process.name, incarnation=process.incarnation))

    def _die(self, process: Process, exit_: Exit) -> None:
        del self.alive[process.name]
        self.send(Gone(name=process.name, incarnation=process.incarnation, exit=exit_))

    def _release(self, process: Process) -> None:
        epoch, process.aborting = process.aborting, 0
        self.send(Released(name=process.name, incarnation=process.incarnation, epoch=epoch))

    def _make_spare_ready(self, name: str) -> None:
        if name not in self.dying_spares:
            self.spares[name] = True
        self.send(SpareReady(name=name))

    def _lose_spare(self, name: str) -> None:
        del self.spares[name]
        self.dying_spares.discard(name)
        self.send(Gone(name=name, incarnation=1, exit=Exit(kind=ExitKind.SIGNAL, signal=9)))

    def _let_something_happen(self) -> bool:
        if self.questions:
            self.the_hook_answers(None)
            return True
        for name in self.spares:
            if name in self.dying_spares:
                self._lose_spare(name)
                return True
            if not self.spares[name]:
                self._make_spare_ready(name)
                return True
        return self._let_a_process_go_on() or self._let_time_pass()

    def _let_a_process_go_on(self) -> bool:
        for process in list(self.alive.values()):
            if process.is_told or process.has_raised or process.is_dying:
                self._die(process, Exit(kind=ExitKind.STOPPED))
                return True
            if not process.is_ready:
                self._become_ready(process)
                return True
            if process.aborting:
                self._release(process)
                return True
        return False

    def _let_time_pass(self) -> bool:
        if self.timers:
            self.next_timer_fires()
            return True
        return False

    def _check_rest(self) -> None:
        root = self.policy.snapshot()
        assert all(status.state in ENDED_OR_READY for status in _all(root))
        assert self.permanent <= self.alive.keys()
        for gang in {self.gangs[name] for name in self.permanent & self.gangs.keys()}:
            ranks = [name for name in self.gangs if self.gangs[name] == gang]
            if self.permanent.issuperset(ranks):
                assert {self.alive[name].epoch for name in ranks} == {self.epochs[gang]}


def _all(status):
    yield status
    for child in status.children:
        yield from _all(child)


def _leaves(status):
    return (each for each in _all(status) if not each.is_supervisor)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
