"""Overlap and trace are what the spans say."""

import json

from hypothesis import given
from hypothesis import strategies as st

from launcher.timeline import chrome_trace, intersection, intervals, overlap, union


def span(actor: str, name: str, start: float, dur_s: float, **more: object) -> dict:
    return {"kind": "span", "actor": actor, "inc": 1, "name": name, "start": start, "dur_s": dur_s, **more}


def test_overlap_counts_moments_in_which_any_rollout_generates():
    events = [
        span("trainer", "train", 10, 4),
        span("trainer", "train", 20, 4),
        span("rollout/0", "generate", 0, 12),
        span("rollout/1", "generate", 11, 2),
        span("rollout/1", "install", 13, 5),
        span("reward", "generate", 13, 9),
        {"kind": "step"},
    ]

    assert overlap(events) == 3 / 8


def test_without_training_there_is_no_overlap():
    assert overlap([span("rollout/0", "generate", 0, 1)]) is None
    assert overlap([span("trainer", "train", 0, 0)]) is None
    assert overlap([span("trainer", "train", 0, 1)]) == 0


def test_spans_are_picked_by_name_and_role():
    events = [span("rollout/0", "generate", 1, 2), span("rollouts", "generate", 5, 1)]

    assert intervals(events, "generate", "rollout") == [(1, 3)]
    assert intervals(events, "generate") == [(1, 3), (5, 6)]


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def moments(spans) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


@given(SPANS, SPANS)
def test_unions_and_intersections_are_those_of_their_moments(one, other):
    assert moments(union(one)) == moments(one)
    assert moments(intersection(union(one), union(other))) == moments(one) & moments(other)
    assert all(a[1] < b[0] for a, b in zip(union(one), union(one)[1:], strict=False))


def test_intervals_that_only_touch_have_nothing_in_common():
    assert intersection([(0, 1), (4, 5)], [(1, 4)]) == []


def test_a_trace_has_a_process_an_actor_a_thread_an_incarnation_and_microseconds():
    events = [
        span("trainer", "train", 100.0, 0.5, step=3, t=100.5),
        {"kind": "child_exited", "actor": "head", "inc": 1, "t": 100.25, "child": "rollout/0"},
        {"kind": "step", "actor": "trainer", "t": 101},
    ]

    trace = chrome_trace(events)["traceEvents"]

    assert json.dumps(trace)
    assert [(row["name"], row["args"]["name"], row["pid"]) for row in trace if row["ph"] == "M"] == [
        ("process_name", "head", 1),
        ("process_name", "trainer", 2),
    ]
    assert {
        "ph": "X",
        "name": "train",
        "ts": 0,
        "dur": 500000,
        "pid": 2,
        "tid": 1,
        "args": {"step": 3},
    } in trace
    mark = next(row for row in trace if row["ph"] == "i")
    assert (mark["name"], mark["ts"], mark["args"]) == ("child_exited", 250000, {"child": "rollout/0"})


def test_an_empty_log_has_an_empty_trace():
    assert chrome_trace([])["traceEvents"] == []
