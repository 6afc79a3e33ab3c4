"""Named points: what is planned happens there, once, in that incarnation only."""

import pytest

from relax_actor import faults
from relax_actor.faults import Action, Fault, InjectedFaultError


@pytest.fixture
def armed(monkeypatch):
    """Arm a plan as an actor would; disarm it afterwards."""

    def arm(*plan, incarnation=1):
        for name, value in faults.plan([*plan]).items():
            monkeypatch.setenv(name, value)
        faults.arm("rollout/0", incarnation)

    yield arm
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.arm("", 0)


def test_without_a_plan_a_point_does_nothing(armed):
    armed()
    assert faults.point("leased") is False


def test_a_fault_strikes_at_the_nth_time_only(armed):
    armed(Fault(actor="rollout/0", point="leased", action=Action.RAISE, nth=2))
    faults.point("leased")
    with pytest.raises(InjectedFaultError, match="leased"):
        faults.point("leased")
    faults.point("leased")


def test_a_fault_of_another_actor_incarnation_or_point_does_not_strike(armed):
    armed(
        Fault(actor="rollout/1", point="leased", action=Action.RAISE),
        Fault(actor="rollout/0", point="leased", action=Action.RAISE, incarnation=2),
        Fault(actor="rollout/0", point="trained", action=Action.RAISE),
    )
    assert faults.point("leased") is False


def test_what_is_in_hand_can_be_lost_or_refused(armed):
    armed(
        Fault(actor="rollout/0", point="finished", action=Action.LOSE),
        Fault(actor="rollout/0", point="submitted", action=Action.REFUSE),
    )
    assert faults.point("finished") is True
    with pytest.raises(ValueError, match="submitted"):
        faults.point("submitted")


def test_a_delay_takes_its_time(armed):
    import time

    armed(Fault(actor="rollout/0", point="trained", action=Action.DELAY, seconds=0.01))
    started = time.monotonic()
    assert faults.point("trained") is False
    assert time.monotonic() - started >= 0.01
