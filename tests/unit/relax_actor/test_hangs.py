"""Who is found to hang: by what its page says, at times given by hand, and against a small model."""

import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.actor import page, work
from relax_actor.actor.work import Limit, WorkWriter
from relax_actor.node.hangs import HangWatch
from transport.shm import ShmSpace


class Page:
    """A page in plain memory, and what is found by it."""

    def __init__(self, hang_after_s: float | None = None) -> None:
        self.memory = memoryview(bytearray(page.PAGE_BYTES))
        self.writer, self.hang_after_s = WorkWriter(self.memory), hang_after_s

    def due(self) -> float:
        return work.read(self.memory).due(self.hang_after_s)

    def why(self, now: float, progress: str = "") -> str:
        return work.read(self.memory).why(self.hang_after_s, now, progress)


def test_a_method_hangs_when_its_limit_is_over_and_not_before() -> None:
    seen = Page()
    seen.writer.limit({1: Limit(15.0, 5.0, "train")})

    assert seen.due() == 15.0
    assert not seen.why(14.9)
    assert seen.why(15.0) == "train ran longer than its max_runtime_s of 5 s"


def test_of_several_methods_the_first_to_be_over_counts() -> None:
    seen = Page()
    limits = {1: Limit(15.0, 5.0, "train"), 2: Limit(12.0, 1.0, "answer")}
    seen.writer.limit(limits)
    assert seen.why(12.0).startswith("answer ran longer than its max_runtime_s of 1 s")

    del limits[2]
    seen.writer.limit(limits)
    assert not seen.why(14.9)
    assert seen.why(15.0).startswith("train")


def test_a_method_that_ended_in_time_is_forgotten() -> None:
    seen = Page()
    seen.writer.limit({1: Limit(15.0, 5.0, "train")})
    seen.writer.limit({})

    assert seen.due() == math.inf
    assert not seen.why(1e9)


def test_who_is_busy_and_gets_nothing_done_hangs() -> None:
    seen = Page(3.0)
    seen.writer.busy("train", 7.0)

    assert seen.due() == 10.0
    assert not seen.why(9.9)
    assert seen.why(10.0) == "busy with train without progress for 3 s"
    assert seen.why(10.0, "step 4") == "busy with train (step 4) without progress for 3 s"


def test_progress_and_idleness_put_it_off() -> None:
    seen = Page(3.0)
    seen.writer.busy("train", 1.0)
    seen.writer.moved(2.0)
    assert seen.due() == 5.0
    seen.writer.idle()
    assert seen.due() == math.inf
    seen.writer.moved(50.0)  # by another thread
    assert seen.due() == math.inf
    seen.writer.busy("step", 100.0)
    assert seen.due() == 103.0


def test_silence_alone_is_no_hang() -> None:
    assert not Page(3.0).why(1e9)


def test_without_a_limit_nobody_hangs() -> None:
    seen = Page()
    seen.writer.busy("train", 1.0)
    assert seen.due() == math.inf
    assert not seen.why(1e9)


def test_a_long_name_is_cut_and_does_not_reach_what_follows() -> None:
    seen = Page(3.0)
    seen.writer.busy("b" * 999, 1.0)
    seen.writer.limit({1: Limit(2.0, 1.0, "m" * 999)})
    assert seen.why(2.0) == f"{'m' * work.TEXT_BYTES} ran longer than its max_runtime_s of 1 s"
    assert not any(seen.memory[work.WORK_AT + 4 * 8 + 2 * work.TEXT_BYTES :])


def test_the_work_is_beside_the_rest_of_the_page(tmp_path) -> None:
    space = ShmSpace("testrun", tmp_path)
    with page.create(space, "a", 1):
        writer = page.PageWriter(space, "a", 1)
        writer.work.limit({1: Limit(math.inf, 1.0, "train")})
        writer.work.busy("train", 1.0)
        for sender in range(page.SLOTS):
            writer.begin(f"s/{sender}", 1, 1, "train")
        with space.attach(space.name("a", 1, page.LABEL)) as segment:
            assert work.read(segment.buf).limit == Limit(math.inf, 1.0, "train")
            assert work.read(segment.buf).doing == "train"
        seen = page.PageView.read(space, "a", 1)
        assert len(seen.marks) == page.SLOTS
        writer.progress("on its way")
        with space.attach(space.name("a", 1, page.LABEL)) as segment:
            assert work.read(segment.buf).moved_at_s > 1.0


STEPS = st.lists(
    st.tuples(st.sampled_from(("busy", "idle", "progress", "look")), st.sampled_from((0.0, 0.5, 1.0, 2.9)))
)


@given(STEPS)
def test_a_hang_is_found_if_and_only_if_nothing_moved_for_so_long(steps: list[tuple[str, float]]) -> None:
    seen, now = Page(3.0), 1.0
    is_busy, still_since = False, 0.0
    for what, seconds in steps:
        now += seconds
        if what == "look":
            assert bool(seen.why(now)) is (is_busy and now - still_since >= 3.0)
            continue
        if what == "progress":
            seen.writer.moved(now)
        elif what == "busy" and not is_busy:
            seen.writer.busy("train", now)
        elif what == "idle":
            seen.writer.idle()
        still_since = still_since if is_busy and what == "busy" else now
        is_busy = is_busy if what == "progress" else what == "busy"


# -- who looks --------------------------------------------------------------------------------------


@pytest.fixture
def space(tmp_path):
    return ShmSpace("testrun", tmp_path)


def test_who_hangs_is_told_once_and_others_are_not(space) -> None:
    with page.create(space, "bad", 1) as bad, page.create(space, "good", 1) as good:
        writer = page.PageWriter(space, "bad", 1)
        writer.progress("step 4")
        writer.work.busy("train", time.monotonic())
        found = asyncio.run(_watch({("bad", 1): bad, ("good", 1): good}, hang_after_s=0.25))
    assert found == [(("bad", 1), "busy with train (step 4) without progress for 0.25 s")]


def test_who_is_forgotten_is_not_looked_at(space) -> None:
    with page.create(space, "dying", 1) as dying, page.create(space, "bad", 1) as bad:
        for segment in (dying, bad):
            WorkWriter(segment.buf).busy("train", 1.0)
        found = asyncio.run(_watch({("dying", 1): dying, ("bad", 1): bad}, forgotten=("dying", 1)))
    assert [key for key, _ in found] == [("bad", 1)]


async def _watch(pages, *, hang_after_s=0.1, forgotten=None):
    loop, found, told = asyncio.get_running_loop(), [], asyncio.Event()
    watch = HangWatch(loop, lambda key, why: (found.append((key, why)), told.set()))
    for key, segment in pages.items():
        watch.watch(key, segment, hang_after_s)
    if forgotten:
        watch.forget(forgotten)
    await asyncio.wait_for(told.wait(), 60)
    for key in pages:
        watch.forget(key)
    return found
