"""The state of a run is a fold of its events, whatever order or form they have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runstate import ChildPhase, RunState, number
from launcher.wording import clean, histogram, plain_line, sparkline, summary_lines


def state_of(*events: dict) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def test_a_story_is_told_to_its_end(story):
    state = state_of(*story)

    child = state.children["rollout/0"]
    assert (child.phase, child.incarnation, child.pid, child.reason) == (
        ChildPhase.STARTING,
        2,
        72,
        "SIGKILL",
    )
    assert child.policy_version is None
    assert (state.run_id, state.steps, state.published, state.restarts) == ("0011aabb", 4, 1, 1)
    assert state.dropped == {"reward is nan": 1, "too late": 1}
    assert state.waiting == "no complete group"
    assert summary_lines(state) == [
        "step       1/4   policy version 1",
        "reward     0.25   ▁",
        "speed      1,234 tokens/s   train 1.50 s, wait 0.50 s   loss 0.5",
        "staleness  0: 96  1: 32",
        "eval       held: 0.5 over 12 samples at step 1, policy version 1",
        "samples    submitted 9  trained 4  dropped 1  running 2  queued 2",
        "dropped    1x reward is nan  1x too late",
        "waiting    no complete group",
    ]


def test_the_summary_says_how_far_trainer_and_rollout_are_apart():
    state = state_of(
        {"kind": "step", "step": 1, "mismatch_abs": 0.0123, "mismatch_k3": 1.5e-4, "max_ratio": 1.25}
    )
    wanted = "log-probs  trainer and rollout differ by 0.0123 (mean), KL 0.00015, ratio up to 1.25"
    assert wanted in summary_lines(state)


def test_a_child_goes_through_its_phases(story):
    phases = []
    state = RunState()
    for event in story:
        state.apply(event)
        child = state.children.get("rollout/0")
        if child and (not phases or phases[-1] != child.phase):
            phases.append(child.phase)

    assert phases == ["starting", "ready", "active", "exited", "restarting", "starting"]


def test_an_installed_version_is_that_of_the_incarnation_that_installed_it(story):
    state = state_of(*story[:4])
    state.apply({"kind": "policy_installed", "actor": "rollout/0", "inc": 1, "version": 5})
    assert state.children["rollout/0"].policy_version == 5

    state.apply({"kind": "policy_installed", "actor": "rollout/0", "inc": 2, "version": 6})
    state.apply({"kind": "policy_installed", "actor": "rollout/9", "inc": 1, "version": 6})
    assert state.children["rollout/0"].policy_version == 5


def test_an_event_of_an_older_incarnation_changes_nothing(story):
    state = state_of(*story)
    state.apply({"kind": "child_ready", "child": "rollout/0", "incarnation": 1})

    assert state.children["rollout/0"].phase == "starting"


def test_a_late_step_is_kept_but_not_shown_as_the_newest():
    late = state_of(
        {"kind": "step", "step": 2, "reward_mean": 1.0}, {"kind": "step", "step": 1, "reward_mean": 0.0}
    )

    assert late.step["step"] == 2
    assert list(late.rewards) == [(2, 1.0), (1, 0.0)]


def test_a_resumed_run_starts_with_a_new_tree(story):
    state = state_of(*story, {**story[0], "run_id": "22223333"})

    assert (state.run_id, state.children, state.restarts) == ("22223333", {}, 0)


def test_the_first_escalation_is_kept_and_the_end_too():
    state = state_of(
        {"kind": "escalated", "supervisor": "rollouts", "reason": "a"},
        {"kind": "escalated", "supervisor": "run", "reason": "b"},
        {"kind": "child_killed", "child": "trainer", "reason": "start took 120 s"},
        {"kind": "host_lost", "host": "a", "actors": 3, "reason": "r"},
        {"kind": "run_ended", "exit_code": 1, "reason": "b"},
    )

    assert state.escalated["reason"] == "a"
    assert state.ended["exit_code"] == 1
    assert list(state.news)[-1] == "host a is lost with 3 actors: r"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "nan", None, True, [1]])
def test_what_is_no_finite_number_counts_as_0(value):
    assert number(value) == 0.0


KINDS = st.sampled_from([name.removeprefix("_on_") for name in dir(RunState) if name.startswith("_on_")])
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers())
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["child", "incarnation", "pid", "step", "reward_mean", "reason", "version", "t", "staleness"]
    ),
    VALUES,
)


@given(st.lists(st.tuples(KINDS | st.just("unknown"), FIELDS), max_size=8))
def test_no_event_is_too_strange_to_be_shown(events):
    state = state_of(*({"kind": kind, **fields} for kind, fields in events))

    summary_lines(state)
    for kind, fields in events:
        assert "\n" not in plain_line({"kind": kind, **fields})


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (0, "run 0011aabb started: async_off_policy, max_staleness 1"),
        (2, ""),
        (4, "step 1: reward 0.25, loss 0.5, 1,234 tokens/s, staleness 0: 96  1: 32"),
        (7, "eval held: 0.5 over 12 samples at step 1, policy version 1"),
        (8, "sample 3.1 dropped (d.jsonl:4): reward is nan"),
        (9, "group 4 dropped (d.jsonl:5): too late"),
        (11, "rollout/0 (incarnation 1) exited: SIGKILL"),
        (12, "rollout/0 restarts in 0.2 s: SIGKILL"),
        (14, "the trainer waits: no complete group"),
    ],
)
def test_an_event_worth_a_line_has_one(story, number, line):
    assert plain_line(story[number]) == line


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"kind": "escalated", "supervisor": "run", "reason": "a\nb"}, "run gave up: a\\nb"),
        ({"kind": "checkpoint_loaded", "step": 3, "path": "p"}, "checkpoint of step 3 loaded: p"),
        ({"kind": "checkpoint_saved", "step": 3, "path": "p"}, "checkpoint of step 3 saved: p"),
        ({"kind": "child_killed", "child": "a", "reason": "b"}, "a is killed: b"),
        (
            {"kind": "host_lost", "host": "a", "actors": 2, "reason": "r"},
            "host a is lost with 2 actors: r",
        ),
        (
            {"kind": "zygote_unfit", "zygote": "torch", "reason": "r"},
            "zygote torch is not used, its actors start slowly: r",
        ),
        (
            {
                "kind": "logprob_mismatch",
                "step": 3,
                "mismatch_abs": 0.5,
                "mismatch_k3": 0.25,
                "max_ratio": 9.0,
            },
            "step 3: log-probs of trainer and rollout differ by 0.5 (mean), KL 0.25, ratio up to 9",
        ),
        (
            {"kind": "step", "step": 1, "loss": "nan", "skipped": "no signal"},
            "step 1: reward -, loss nan, 0 tokens/s, staleness -, skipped: no signal",
        ),
    ],
)
def test_other_lines(event, line):
    assert plain_line(event) == line


def test_text_from_outside_cannot_move_the_cursor_or_break_the_terminal():
    assert clean("\x1b[2J\ud83d\0ok\u202e\n") == "\\x1b[2J\\ud83d\\x00ok\\u202e\\n"


def test_a_sparkline_goes_from_the_lowest_to_the_highest_of_the_newest():
    assert sparkline([5.0, 0.0, 1.0], width=2) == "▁█"
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"


def test_a_ledger_that_does_not_balance_is_shouted():
    state = state_of({"kind": "ledger", "submitted": 1, "balances": False})

    assert summary_lines(state)[-1].endswith("DOES NOT BALANCE")


def test_staleness_is_sorted_by_versions_not_by_text():
    assert histogram({"10": 1, "9": 2}) == "9: 2  10: 1"
    assert histogram({"odd": 1}) == "odd: 1"
