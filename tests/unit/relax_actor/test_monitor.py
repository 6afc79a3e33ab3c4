"""What a monitor is told, in which order, and when it ends."""

import asyncio
import threading

from hypothesis import given
from hypothesis import strategies as st

from relax_actor.supervision.events import Exit, ExitKind
from relax_actor.supervision.monitor import MonitorHub, Phase, Seen

KILLED = Exit(kind=ExitKind.SIGNAL, signal=9)


def live(hub: MonitorHub, incarnation: int = 1, name: str = "a") -> None:
    for phase in (Phase.UP, Phase.READY, Phase.DYING):
        hub.note(phase, name, incarnation)
    hub.note(Phase.GONE, name, incarnation, KILLED)


def told(hub: MonitorHub, monitor) -> list[str]:
    hub.close()
    return [str(seen) for seen in monitor]


def test_each_incarnation_is_told_in_order() -> None:
    hub = MonitorHub()
    hub.note(Phase.UP, "a", 1)
    monitor = hub.monitor("a")
    live(hub)
    live(hub, 2)
    live(hub, 1, "other")

    assert told(hub, monitor) == [
        "a#1 up",
        "a#1 ready",
        "a#1 dying",
        "a#1 gone (SIGKILL)",
        "a#2 up",
        "a#2 ready",
        "a#2 dying",
        "a#2 gone (SIGKILL)",
    ]


def test_who_is_not_there_is_gone_at_once() -> None:
    hub = MonitorHub()
    live(hub, 3)
    assert hub.monitor("nobody").next(0) == Seen(phase=Phase.GONE, name="nobody", incarnation=0)
    assert str(hub.monitor("a").next(0)) == "a#3 gone (noproc)"


def test_a_late_monitor_is_told_what_runs_now() -> None:
    hub = MonitorHub()
    live(hub, 1)
    hub.note(Phase.UP, "a", 2)
    hub.note(Phase.READY, "a", 2)
    assert told(hub, hub.monitor("a")) == ["a#2 up", "a#2 ready"]


def test_a_closed_monitor_hears_nothing_more() -> None:
    hub = MonitorHub()
    hub.note(Phase.UP, "a", 1)
    with hub.monitor("a") as monitor:
        assert monitor.next(0) is not None
        assert monitor.next(0) is None
    live(hub)
    assert list(monitor) == []
    monitor.close()


def test_a_monitor_of_a_tree_that_is_down_ends() -> None:
    hub = MonitorHub()
    hub.close()
    assert [str(seen) for seen in hub.monitor("a")] == ["a#0 gone (noproc)"]


async def _iterate(hub: MonitorHub) -> list[str]:
    feeder = threading.Thread(target=lambda: (live(hub, 1), hub.close()))
    said = []
    async for seen in hub.monitor("a"):
        said.append(str(seen))
        if len(said) == 1:
            feeder.start()
    feeder.join()
    return said


def test_a_monitor_can_be_iterated_asynchronously() -> None:
    said = asyncio.run(_iterate(MonitorHub()))
    assert said == ["a#0 gone (noproc)", "a#1 up", "a#1 ready", "a#1 dying", "a#1 gone (SIGKILL)"]


async def _abandon(hub: MonitorHub) -> None:
    monitor = hub.monitor("a")
    iterator = aiter(monitor)
    await anext(iterator)
    waiting = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0)
    waiting.cancel()


def test_a_loop_that_ended_does_not_keep_others_from_hearing() -> None:
    hub = MonitorHub()
    asyncio.run(_abandon(hub))
    live(hub)


@given(st.lists(st.tuples(st.sampled_from(Phase), st.integers(1, 3))))
def test_whatever_is_noted_each_incarnation_ends_once_and_goes_forward(notes) -> None:
    hub = MonitorHub()
    monitor = hub.monitor("a")
    for phase, incarnation in notes:
        hub.note(phase, "a", incarnation)
    hub.close()
    monitor.next()  # noproc
    seen = list(monitor)
    for incarnation in {each.incarnation for each in seen}:
        phases = [each.phase for each in seen if each.incarnation == incarnation]
        assert phases == sorted(set(phases))
    ended = [each.incarnation for each in seen if each.phase is Phase.GONE]
    assert len(ended) == len(set(ended))
