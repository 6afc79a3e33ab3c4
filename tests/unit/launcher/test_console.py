"""A run is drawn from its event log, in a terminal or not, and drawing never stops it."""

import io
import re

import pytest
from rich.console import Console

from launcher.console import REDRAW_S, Display, render
from launcher.runstate import RunState
from transport.clock import ManualClock


@pytest.fixture
def events(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def drawn(story):
    def draw(**options) -> str:
        state = RunState()
        for event in story:
            state.apply({"t": 1000.0} | event)
        out = io.StringIO()
        Console(file=out, width=100, **options).print(render(state))
        return out.getvalue()

    return draw


def test_without_colour_the_picture_says_everything_in_words(drawn):
    assert [line.rstrip() for line in drawn(no_color=True).splitlines()] == [
        "run 0011aabb  async_off_policy  max_staleness 1  0 s  1 restarts",
        "actor      state     incarnation  policy  pid  last exit",
        "rollout/0  starting  2            -       72   SIGKILL",
        "step       1/4   policy version 1",
        "reward     0.25   ▁",
        "speed      1,234 tokens/s   train 1.50 s, wait 0.50 s   loss 0.5",
        "staleness  0: 96  1: 32",
        "eval       held: 0.5 over 12 samples at step 1, policy version 1",
        "samples    submitted 9  trained 4  dropped 1  running 2  queued 2",
        "dropped    1x reward is nan  1x too late",
        "waiting    no complete group",
        "· sample 3.1 dropped (d.jsonl:4): reward is nan",
        "· group 4 dropped (d.jsonl:5): too late",
        "· rollout/0 exited (incarnation 1): SIGKILL",
        "· rollout/0 restarts in 0.2 s: SIGKILL",
    ]


def test_in_a_terminal_states_have_colours(drawn):
    assert "\x1b[33mstarting" in drawn(force_terminal=True, color_system="standard")


def test_actors_are_sorted_by_role_and_number_and_markup_is_text():
    state = RunState()
    for name in ("trainer", "rollout/10", "rollout/2", "[red]x"):
        state.apply({"kind": "child_spawned", "child": name, "incarnation": 1})
    state.apply({"kind": "run_ended", "exit_code": 1, "reason": "[bold]"})
    out = io.StringIO()
    Console(file=out, width=100).print(render(state))

    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["[red]x", "rollout/2", "rollout/10", "trainer"]
    assert "ended, exit code 1: [bold]" in lines[0]


def test_where_nothing_is_redrawn_each_event_worth_it_is_a_line(events, story, log_of):
    out, clock = io.StringIO(), ManualClock()
    display = Display(events, out, live=False, monotonic=clock.monotonic)

    assert display.tick()
    log_of(events, *story[:5])
    assert not display.tick()  # too soon
    clock.advance(REDRAW_S)
    assert display.tick()
    log_of(events, *story[11:12])
    display.close()

    assert out.getvalue().splitlines() == [
        "run 0011aabb started: async_off_policy, max_staleness 1",
        "step 1: reward 0.25, loss 0.5, 1,234 tokens/s, staleness 0: 96  1: 32",
        "rollout/0 (incarnation 1) exited: SIGKILL",
    ]


def test_events_of_an_earlier_launch_are_not_told_again(events, story, log_of):
    log_of(events, *story)
    out = io.StringIO()

    Display(events, out, live=False, offset=events.stat().st_size).close()

    assert out.getvalue() == ""


def test_a_live_display_redraws_and_leaves_the_last_picture(events, story, log_of):
    out = io.StringIO()
    display = Display(events, out, live=True)
    log_of(events, *story)
    display.tick()
    display.close()

    assert "rollout/0" in out.getvalue()


@pytest.mark.parametrize(("color", "is_colored"), [("always", True), ("never", False), ("auto", False)])
def test_colors_are_as_they_are_asked_for(events, story, log_of, color, is_colored):
    out = io.StringIO()
    display = Display(events, out, live=True, color=color)
    log_of(events, *story)
    display.close()
    assert bool(re.search("\x1b\\[[0-9;]*3[1-6]m", out.getvalue())) is is_colored


class Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError("the terminal is gone")


def test_a_display_that_breaks_is_switched_off(events, story, log_of):
    log_of(events, *story)
    clock = ManualClock()
    display = Display(events, Broken(), live=False, monotonic=clock.monotonic)

    assert display.tick()
    assert isinstance(display.broken, OSError)
    clock.advance(REDRAW_S)
    assert display.tick()
    display.close()
