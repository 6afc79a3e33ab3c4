"""The learning rate as a function of progress."""

import pytest

from relax_actor.rl.schedule import learning_rate_frac


def fractions(n: int, **options) -> list[float]:
    return [learning_rate_frac(update, **options) for update in range(n)]


def test_the_warm_up_rises_in_equal_steps_and_never_starts_at_zero():
    found = fractions(6, warmup=4, total=6, linear=False, min_frac=0.0)

    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_one_to_its_minimum_at_the_last_update():
    found = fractions(7, warmup=2, total=7, linear=True, min_frac=0.2)

    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_linear_stays_at_its_minimum_should_the_run_go_on():
    assert learning_rate_frac(99, warmup=0, total=10, linear=True, min_frac=0.1) == pytest.approx(0.1)


def test_a_run_of_one_update_starts_at_the_peak():
    assert learning_rate_frac(0, warmup=0, total=1, linear=True, min_frac=0.1) == 1.0


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    assert fractions(2, warmup=4, total=2, linear=True, min_frac=0.1) == [0.25, 0.5]
