"""A world round one supervision policy, with a manual clock: what the policy's tests play in."""

import random
from dataclasses import dataclass, field

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
    Decided,
    Decision,
    Exit,
    ExitKind,
    Failed,
    Gone,
    InitFailed,
    Ready,
    Released,
    SpareReady,
    StartAll,
    StopRequested,
    TimerFired,
)
from relax_actor.supervision.policy import TreePolicy
from relax_actor.supervision.spec import Backoff, ChildSpec, SupervisorSpec
from relax_actor.supervision.states import ChildState

SIGKILL = Exit(kind=ExitKind.SIGNAL, signal=9)
NORMAL = Exit(kind=ExitKind.NORMAL, code=0)
STOPPED = Exit(kind=ExitKind.STOPPED, code=0)
BUG = Exit(kind=ExitKind.ERROR, code=1, detail="ValueError: bad row")
STEADY = Backoff(base_s=1.0, cap_s=8.0, reset_after_s=100.0, jitter_frac=0.0)


@dataclass
class Play:
    """The world around one policy: obeys its commands, keeps its timers, and writes down what it did."""

    policy: TreePolicy
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    alive: dict[str, int] = field(default_factory=dict)
    finished: Finished | None = None
    groups: list[Regroup] = field(default_factory=list)
    questions: list[Consult] = field(default_factory=list)

    def send(self, event) -> "Play":
        for command in self.policy.handle(event, self.now):
            self._obey(command)
        return self

    def start(self) -> list[str]:
        return self.send(StartAll()).new()

    def ready(self, *names: str) -> list[str]:
        for name in names:
            self.send(Ready(name=name, incarnation=self.alive[name]))
        return self.new()

    def die(self, name: str, exit_: Exit = SIGKILL) -> list[str]:
        return self.send(Gone(name=name, incarnation=self.alive.pop(name), exit=exit_)).new()

    def raise_in_init(self, name: str, error: str = "ValueError: bad row") -> list[str]:
        self.send(InitFailed(name=name, incarnation=self.alive[name], error=error))
        self.new()
        return self.die(name, Exit(kind=ExitKind.ERROR, code=1))

    def spare_ready(self, name: str) -> list[str]:
        return self.send(SpareReady(name=name)).new()

    def release(self, *names: str, epoch: int = 1) -> list[str]:
        for name in names:
            self.send(Released(name=name, incarnation=self.alive[name], epoch=epoch))
        return self.new()

    def decide(self, name: str, decision: Decision | None, detail: str = "") -> list[str]:
        (question,) = [each for each in self.questions[-1:] if each.name == name]
        answer = Decided(name=name, incarnation=question.incarnation, decision=decision, detail=detail)
        return self.send(answer).new()

    def hang(self, name: str) -> list[str]:
        hung = Exit(kind=ExitKind.HANG, detail="busy")
        return self.send(Failed(name=name, incarnation=self.alive[name], exit=hung)).new()

    def stop(self, reason: str = "SIGINT") -> list[str]:
        return self.send(StopRequested(reason=reason)).new()

    def wait(self, seconds: float) -> list[str]:
        end_s = self.now + seconds
        while self.timers and min(self.timers.values()) <= end_s:
            timer = min(self.timers, key=self.timers.__getitem__)
            self.now = self.timers.pop(timer)
            self.send(TimerFired(timer=timer))
        self.now = end_s
        return self.new()

    def new(self) -> list[str]:
        said, self.said = self.said, []
        return said

    def start_all_ready(self) -> "Play":
        self.start()
        return self.make_ready()

    def make_ready(self) -> "Play":
        starting = [name for name, state in self.states().items() if state is ChildState.STARTING]
        while starting:
            self.ready(*starting)
            starting = [name for name, state in self.states().items() if state is ChildState.STARTING]
        return self

    def states(self) -> dict[str, ChildState]:
        return dict(_actors(self.policy.snapshot()))

    def delay_s(self) -> float:
        (delay_s,) = (at_s - self.now for timer, at_s in self.timers.items() if timer.endswith(":backoff"))
        return delay_s

    def reported(self, kind: ReportKind) -> list[dict]:
        return [report.fields for report in self.reports if report.kind is kind]

    def _obey(self, command) -> None:  # noqa: C901 - one case a command
        match command:
            case Spawn():
                assert command.name not in self.alive
                self.alive[command.name] = command.incarnation
                self.said.append(f"spawn {command.name}#{command.incarnation}")
            case SpawnSpare():
                self.alive[command.name] = 1
                self.said.append(f"spare {command.name}")
            case Promote():
                del self.alive[command.spare]
                self.alive[command.name] = command.incarnation
                self.said.append(f"promote {command.spare} {command.name}#{command.incarnation}")
            case GangAbort():
                self.said.append(f"abort {command.name}#{command.incarnation} {command.epoch}")
            case Regroup():
                self.said.append(f"regroup {command.name}#{command.incarnation} {command.epoch}")
                self.groups.append(command)
            case Consult():
                self.said.append(f"ask {command.name}#{command.incarnation}")
                self.questions.append(command)
            case Stop() if command.drain_s:
                self.said.append(f"drain {command.name}#{command.incarnation}")
            case Stop() | Kill():
                self.said.append(f"{type(command).__name__.lower()} {command.name}#{command.incarnation}")
            case SetTimer():
                self.timers[command.timer] = self.now + command.delay_s
            case CancelTimer():
                del self.timers[command.timer]
            case Report():
                self.reports.append(command)
            case Finished():
                assert self.finished is None
                assert not self.timers
                self.finished = command
                self.said.append(f"finished {command.outcome}")


def _actors(status):
    if not status.is_supervisor:
        yield status.name, status.state
    for child in status.children:
        yield from _actors(child)


def child(name: str, **options) -> ChildSpec:
    return ChildSpec(id=name, actor="roles:Any", **options)


def abc(**options) -> tuple[ChildSpec, ...]:
    return tuple(child(name, **options) for name in "abc")


def tree(*children, name: str = "run", **options) -> SupervisorSpec:
    return SupervisorSpec(id=name, children=children, **{"backoff": STEADY, **options})


def play(*children, consult_s: float | None = None, stop_total_s: float | None = None, **options) -> Play:
    policy = TreePolicy(
        tree(*children, **options), random.Random(0), consult_s=consult_s, stop_total_s=stop_total_s
    )
    return Play(policy)


def running(*children, **options) -> Play:
    return play(*children, **options).start_all_ready()
