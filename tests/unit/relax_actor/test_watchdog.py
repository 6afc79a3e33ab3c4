"""Who is found to hang, with times given by hand, and against a small model."""

from hypothesis import given
from hypothesis import strategies as st

from relax_actor.supervision.watchdog import Watchdog

KEY = ("a", 1)


def watching(hang_after_s: float | None = None) -> Watchdog:
    dog = Watchdog()
    dog.watch(KEY, hang_after_s)
    return dog


def busy(dog: Watchdog, now: float, done: int = 0, *, is_busy: bool = True) -> None:
    dog.beat(KEY, is_busy=is_busy, done=done, doing="train" if is_busy else "", now=now)


def test_a_method_hangs_when_its_limit_is_over_and_not_before() -> None:
    dog = watching()
    dog.began(KEY, "1", "train", 5.0, 10.0)

    assert dog.next_look() == 15.0
    assert dog.overdue(14.9) == []
    assert dog.overdue(15.0) == [(KEY, "train ran longer than its max_runtime_s of 5 s")]
    assert dog.overdue(99.0) == []  # found once


def test_a_method_that_ended_in_time_is_forgotten() -> None:
    dog = watching()
    dog.began(KEY, "1", "train", 5.0, 10.0)
    dog.ended(KEY, "1")

    assert dog.next_look() is None
    assert dog.overdue(99.0) == []


def test_who_is_busy_and_gets_nothing_done_hangs() -> None:
    dog = watching(3.0)
    busy(dog, 0.0, done=7)

    assert dog.next_look() == 3.0
    assert dog.overdue(2.9) == []
    assert dog.overdue(3.0) == [(KEY, "busy with train without progress for 3 s")]


def test_progress_and_idleness_put_it_off() -> None:
    dog = watching(3.0)
    busy(dog, 0.0, done=1)
    busy(dog, 2.0, done=2)
    assert dog.next_look() == 5.0
    busy(dog, 4.0, done=2, is_busy=False)
    assert dog.next_look() is None
    assert dog.overdue(99.0) == []
    busy(dog, 100.0, done=2)
    assert dog.next_look() == 103.0


def test_silence_alone_is_no_hang() -> None:
    dog = watching(3.0)
    assert dog.overdue(1e9) == []


def test_without_a_limit_nobody_hangs() -> None:
    dog = watching()
    busy(dog, 0.0)
    assert dog.next_look() is None
    assert dog.overdue(1e9) == []


def test_who_is_gone_or_unknown_is_not_watched() -> None:
    dog = watching(3.0)
    dog.forget(KEY)
    busy(dog, 0.0)
    dog.began(KEY, "1", "train", 5.0, 0.0)
    dog.ended(KEY, "1")
    dog.forget(KEY)
    assert dog.next_look() is None


STEPS = st.lists(
    st.tuples(st.sampled_from(("busy", "idle", "progress", "look")), st.sampled_from((0.0, 0.5, 1.0, 2.9)))
)


@given(STEPS)
def test_a_hang_is_found_if_and_only_if_nothing_moved_for_so_long(steps: list[tuple[str, float]]) -> None:
    dog, now, done = watching(3.0), 0.0, 0
    is_busy, still_since = False, 0.0
    for what, seconds in steps:
        now += seconds
        if what == "look":
            is_hung = is_busy and now - still_since >= 3.0
            assert bool(dog.overdue(now)) is is_hung
            if is_hung:
                return
            continue
        still_since = still_since if is_busy and what == "busy" else now
        is_busy, done = what != "idle", done + (what == "progress")
        busy(dog, now, done, is_busy=is_busy)
