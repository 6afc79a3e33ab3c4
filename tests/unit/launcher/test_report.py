"""At its end a run leaves a picture, a timeline and last lines that name the outcome."""

import json
import resource

import pytest

from launcher.report import summary, write_reports
from launcher.runfolder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(str(tmp_path / "run"), name="x")


SPANS = (
    {"kind": "span", "actor": "trainer", "name": "train", "start": 1001.0, "dur_s": 2.0},
    {"kind": "span", "actor": "rollout/0", "name": "generate", "start": 1000.0, "dur_s": 2.0},
)


def test_picture_and_timeline_are_written(folder, story, log_of):
    log_of(folder.events, *story, *SPANS)

    assert write_reports(folder) == []
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(folder.timeline.read_text())["traceEvents"]) > 2


def test_a_run_without_events_has_an_empty_picture(folder):
    assert write_reports(folder) == []
    assert folder.picture.exists()


def test_a_name_that_looks_like_mathematics_is_drawn_as_text(folder, log_of):
    log_of(folder.events, {"kind": "child_restarting", "child": "$\\frac$", "incarnation": 1, "delay_s": 1})

    assert write_reports(folder) == []


def test_a_report_that_cannot_be_written_is_said_and_fails_nothing(folder, story, log_of):
    log_of(folder.events, *story)
    folder.picture.mkdir()
    failures = write_reports(folder)

    assert failures[0].startswith("reward.png was not written: ")
    assert "reward.png" in summary(folder, exit_code=0, reason="", failures=failures)


def test_a_run_that_had_been_finished_already_says_so(folder, log_of):
    log_of(folder.events, {"kind": "run_started", "steps": 4}, {"kind": "checkpoint_loaded", "step": 4})

    last = summary(folder, exit_code=0, reason="").splitlines()[-1]

    assert last == f"done: nothing was left, step 4 of 4 is trained ({folder.path})"


def test_a_report_for_which_there_is_no_room_leaves_no_half_of_it(folder, story, log_of):
    log_of(folder.events, *story)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        failures = write_reports(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert len(failures) == 2
    names = {path.name.strip(".") for path in folder.path.iterdir()}
    assert not {"reward.png", "reward.png.new", "timeline.json", "timeline.json.new"} & names


def test_a_run_that_is_done_says_so_last(folder, story, log_of):
    log_of(folder.events, *story, *SPANS)
    write_reports(folder)

    lines = summary(folder, exit_code=0, reason="done").splitlines()

    assert lines[0] == "steps      1 in 4.0 s, 1 restarts"
    assert lines[1] == "overlap    50% of training time a rollout was generating"
    assert lines[2:5] == [
        f"picture    {folder.picture}",
        f"timeline   {folder.timeline}",
        f"logs       {folder.logs}",
    ]
    assert lines[-1] == f"done: step 1 of 4, reward 0.250 -> 0.250 ({folder.path})"


def test_a_run_that_failed_names_actor_cause_and_log_last(folder, story, log_of):
    log_of(folder.events, *story)

    last = summary(folder, exit_code=1, reason="`rollout/0` needed 9 restarts\n  last exit: SIGKILL")

    assert last.splitlines()[-1] == (
        "failed: `rollout/0` needed 9 restarts last exit: SIGKILL (exit code 1, log: logs/rollout-0-2.log)"
    )


def test_a_run_that_failed_without_an_actor_names_the_logs(folder):
    last = summary(folder, exit_code=1, reason="").splitlines()[-1]

    assert last == f"failed: no reason was given (exit code 1, log: {folder.logs})"


def test_a_run_that_was_stopped_is_not_called_failed(folder):
    assert (
        summary(folder, exit_code=130, reason="stopped: SIGINT")
        .splitlines()[-1]
        .startswith("stopped: SIGINT")
    )
