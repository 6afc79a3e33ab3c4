"""How a run is watched, ended from outside, and given up where it has lost the hosts it needs."""

from collections.abc import Callable

import msgspec

from relax_actor import homes
from relax_actor.config import Config
from relax_actor.preemption import Preemption
from relax_actor.supervision.spec import SpecError
from relax_actor.supervision.supervisor import Supervisor

POLL_S = 0.1

HOST_LOST = 4
"""The exit code of a run that ended because a host did."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    exit_code: int  # 0 done, 1 failed, 4 too many hosts lost, 130 on SIGINT, 140 on SIGUSR2, 143 on SIGTERM
    reason: str


class RunControl:
    """How another thread, or a signal handler, ends a run.

    Plain flags: a signal handler may interrupt whoever holds a lock, and would wait for it without end.

    Attributes:
        preempting: whether the run is to make room for another one.
        stopping: whether it is to end in order.
        killing: whether it is to end now.
        reason: the first one given.
    """

    def __init__(self) -> None:
        self.preempting = self.stopping = self.killing = False
        self.reason = ""

    def preempt(self, reason: str) -> None:
        """End after the step at hand, with a checkpoint, to be resumed later."""
        self.reason = self.reason or reason
        self.preempting = True

    def stop(self, reason: str) -> None:
        """End in order: each actor gets its time to clean up."""
        self.reason = self.reason or reason
        self.stopping = True

    def kill(self, reason: str) -> None:
        """End now."""
        self.reason = self.reason or reason
        self.killing = True


def watch(
    supervisor: Supervisor, config: Config, control: RunControl | None, on_tick: Callable[[], None] | None
) -> Outcome:
    """Return how a run ended; meanwhile do as `control` says, and stop it where it is hopeless.

    Args:
        supervisor: of the run's tree, started.
        config: the run's.
        control: how the caller ends it early, if it may.
        on_tick: called about ten times a second, in this thread.
    """
    control = control or RunControl()
    told_to_stop = told_to_kill = False
    hopeless = ""
    preemption = Preemption(supervisor, config.run.grace_s)
    while (finished := supervisor.wait(POLL_S)) is None:
        if control.killing and not told_to_kill:
            told_to_kill = True
            supervisor.kill(control.reason)
        elif control.stopping and not told_to_stop:
            told_to_stop = True
            supervisor.stop(control.reason)
        elif not told_to_stop and not hopeless and (lost := _why_hopeless(supervisor, config)):
            hopeless = lost
            supervisor.stop(hopeless)
        elif control.preempting and not told_to_stop:
            told_to_stop = preemption.is_overdue()
        if on_tick is not None:
            on_tick()
    if told_to_stop or told_to_kill:
        return Outcome(exit_code=_signal_code(control.reason), reason=f"stopped: {control.reason}")
    if hopeless:
        return Outcome(exit_code=HOST_LOST, reason=hopeless)
    if preemption.is_granted and finished.outcome == "ok":
        return Outcome(exit_code=_signal_code(control.reason), reason=f"preempted: {control.reason}")
    return Outcome(exit_code=0 if finished.outcome == "ok" else 1, reason=finished.reason)


def _why_hopeless(supervisor: Supervisor, config: Config) -> str:
    homeless = supervisor.homeless
    if not homeless:
        return ""
    try:
        rollouts = supervisor.replicas(homes.ROLLOUT)
    except SpecError:  # they are gone before those that wait for a host: the run has ended
        return ""
    return homes.why_hopeless(config, homeless, rollouts)


def _signal_code(reason: str) -> int:
    return {"SIGINT": 130, "SIGTERM": 143, "SIGUSR2": 140}.get(reason, 1)
