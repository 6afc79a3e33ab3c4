"""What a step says about itself, and when it rings the alarm."""

import pytest

from relax_actor.rl.apart import Mismatch
from relax_actor.roles.step_stats import ALARM_EVERY_S, Alarm, StepStats
from relax_actor.trainers.base import MicrobatchStats


def part(tokens, apart, **fields):
    return MicrobatchStats(
        tokens=tokens,
        loss=0.0,
        clipped_tokens=0,
        kl_sum=0.0,
        mismatch_abs_sum=apart,
        mismatch_k3_sum=apart / 2,
        max_ratio=1.0 + apart,
        **fields,
    )


def test_the_mismatch_is_a_mean_over_tokens_of_all_microbatches_and_of_each_version():
    stats = StepStats()
    old, new = (Mismatch(abs_sum=n, k3_sum=0.0, max_ratio=n, tokens=4) for n in (2.0, 1.0))
    stats.add(part(6, 3.0, by_version={4: old}))
    stats.add(part(2, 1.0, by_version={3: new, 4: new}))

    fields = stats.fields()

    assert (fields["mismatch_abs"], fields["mismatch_k3"], fields["max_ratio"]) == (0.5, 0.25, 4.0)
    assert list(fields["mismatch_by_version"]) == ["3", "4"]
    assert fields["mismatch_by_version"]["4"] == {"tokens": 8, "abs": 0.375, "k3": 0.0, "max_ratio": 2.0}
    assert "routing_mismatch_frac" not in fields


def test_compared_routes_are_told_as_a_share():
    stats = StepStats()
    stats.add(part(6, 3.0, routed_places=60, routed_apart=6))
    stats.add(part(6, 3.0, routed_places=40, routed_apart=4))
    assert stats.fields()["routing_mismatch_frac"] == pytest.approx(0.1)


def test_the_entropy_is_a_mean_over_tokens():
    stats = StepStats()
    stats.add(part(6, 3.0, entropy_sum=9.0))
    stats.add(part(2, 1.0, entropy_sum=1.0))
    assert stats.fields()["entropy"] == 1.25


def test_a_step_without_tokens_has_no_mismatch():
    assert StepStats().mismatch_abs == 0.0


def test_the_alarm_rings_above_its_limit_and_once_a_minute_at_most():
    alarm = Alarm(0.1)
    assert not alarm.rings(0.1, 0.0)
    assert alarm.rings(0.11, 0.0)
    assert not alarm.rings(9.0, ALARM_EVERY_S - 1)
    assert not alarm.rings(0.0, ALARM_EVERY_S)
    assert alarm.rings(0.2, ALARM_EVERY_S)


def test_an_alarm_without_limit_is_off():
    assert not Alarm(0.0).rings(99.0, 0.0)
