"""Equal lines of replicas are shown once, and nothing else is ever merged, lost or put out of order."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.merging import LineMerger, Source, said_by

WINDOW_S = 1.0


def replica(number, role="rollout", incarnation=1):
    return Source(role=role, replica=number, incarnation=incarnation)


TRAINER = replica(-1, "trainer")
SOURCES = st.sampled_from(
    [*(replica(n) for n in range(4)), replica(0, incarnation=2), replica(0, "reward"), TRAINER]
)
ARRIVALS = st.lists(
    st.tuples(SOURCES, st.sampled_from("abc"), st.sampled_from([0.0, 0.0, 0.2, 0.7, 1.5])), max_size=60
)


@given(ARRIVALS)
def test_no_line_is_lost_or_out_of_order_and_only_replicas_within_the_window_are_merged(arrivals):
    merger, now, shown = LineMerger(WINDOW_S), 0.0, []
    said, came = defaultdict(list), defaultdict(list)
    for source, text, later in arrivals:
        now += later
        merger.take(source, text, now)
        said[source].append(text)
        came[source].append(now)
        shown += merger.due(now)
        waiting = Counter(each for one in shown for each in one.sources)
        assert all(at > now - WINDOW_S for each, ats in came.items() for at in ats[waiting[each] :]), (
            "none is late"
        )
    shown += merger.flush()

    told = defaultdict(list)
    for one in shown:
        assert len({(each.role, each.incarnation) for each in one.sources}) == 1
        assert list(one.sources) == sorted(set(one.sources))
        assert len(one.sources) == 1 or one.sources[0].replica >= 0
        moments = [came[each][len(told[each])] for each in one.sources]
        assert max(moments) - min(moments) <= WINDOW_S
        for each in one.sources:
            told[each].append(one.text)
    assert told == said


@given(st.lists(st.text("ab", max_size=2), max_size=20), st.integers(1, 5))
def test_replicas_that_say_the_same_are_shown_as_one(lines, replicas):
    merger = LineMerger(WINDOW_S)
    for number in range(replicas):
        for line in lines:
            merger.take(replica(number), line, 0.1 * number)

    everyone = tuple(map(replica, range(replicas)))
    assert [(one.sources, one.text) for one in merger.flush()] == [(everyone, line) for line in lines]


def test_a_line_of_its_own_in_between_does_not_part_replicas():
    merger = LineMerger(WINDOW_S)
    for line in ("loading", "ready"):
        merger.take(replica(0), line, 0.0)
    for line in ("a warning", "loading", "ready"):
        merger.take(replica(1), line, 0.2)

    assert [str(said_by(one.sources)) + " " + one.text for one in merger.due(1.0)] == [
        "rollout/1#1 a warning",
        "rollout/{0-1}#1 loading",
        "rollout/{0-1}#1 ready",
    ]


def test_lines_in_opposite_order_are_merged_where_order_allows():
    merger = LineMerger(WINDOW_S)
    for number, lines in enumerate(("ab", "ba")):
        for line in lines:
            merger.take(replica(number), line, 0.0)

    assert sorted(len(one.sources) for one in merger.flush()) == [1, 1, 2]


def test_a_line_waits_for_its_like_no_longer_than_the_window():
    merger = LineMerger(WINDOW_S)
    merger.take(replica(0), "x", 0.0)
    assert merger.due(0.99) == []
    assert [one.sources for one in merger.due(1.0)] == [(replica(0),)]
    merger.take(replica(1), "x", 1.01)
    assert [one.sources for one in merger.flush()] == [(replica(1),)]


def test_more_replicas_than_may_wait_for_one_another_lose_nothing():
    merger = LineMerger(WINDOW_S)
    for number in range(200):  # the first line of each stands behind the first of the next
        for text in (str(number), str(number - 1)):
            merger.take(replica(number), text, 0.0)

    shown = merger.flush()
    assert Counter(each for one in shown for each in one.sources) == {replica(n): 2 for n in range(200)}
    assert max(len(one.sources) for one in shown) == 2


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ([3], "rollout/3#2"),
        ([0, 1, 2, 3, 5], "rollout/{0-3,5}#2"),
        ([7, 9], "rollout/{7,9}#2"),
        ([-1], "rollout#2"),
    ],
)
def test_a_set_of_replicas_is_named_exactly(numbers, name):
    assert said_by([replica(number, incarnation=2) for number in numbers]) == name
