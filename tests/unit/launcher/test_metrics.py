"""Metrics are derived from the event log by one writer, and nothing of them is lost."""

import importlib
import json

import pytest

from launcher.metrics import MetricsWriter, metrics_row


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_and_evaluations_have_their_own_axes_and_wall_clock(tmp_path, story, log_of):
    log_of(tmp_path / "events", *story)
    MetricsWriter(tmp_path / "events", tmp_path / "metrics").poll()

    step, evaluation = rows(tmp_path / "metrics")
    assert (step["axis"], step["step"], step["wall_s"], step["reward_mean"]) == ("train", 1, 4.0, 0.25)
    assert (evaluation["axis"], evaluation["step"], evaluation["mean_reward"]) == ("eval/held", 1, 0.5)
    assert "pid" not in step


def test_a_late_row_is_kept_with_its_own_step(tmp_path, log_of):
    writer = MetricsWriter(tmp_path / "events", tmp_path / "metrics")
    log_of(tmp_path / "events", {"kind": "step", "step": 8})
    writer.poll()
    log_of(tmp_path / "events", {"kind": "eval", "step": 5, "mean_reward": 1.0}, {"kind": "step", "step": 7})
    writer.poll()
    writer.poll()

    assert [(row["axis"], row["step"]) for row in rows(tmp_path / "metrics")] == [
        ("train", 8),
        ("eval/eval", 5),
        ("train", 7),
    ]


def test_metrics_of_a_resumed_run_are_derived_anew_and_its_clock_goes_on(tmp_path, story, log_of):
    log_of(tmp_path / "events", *story[:5])
    MetricsWriter(tmp_path / "events", tmp_path / "metrics").poll()
    log_of(tmp_path / "events", {**story[0], "t": 2000.0}, {"kind": "step", "step": 2, "t": 2001.0})
    MetricsWriter(tmp_path / "events", tmp_path / "metrics").poll()

    assert [(row["step"], row["wall_s"]) for row in rows(tmp_path / "metrics")] == [(1, 4.0), (2, 1001.0)]


def test_a_full_disk_costs_nothing_but_a_delay(tmp_path, story, log_of):
    log_of(tmp_path / "events", *story)
    writer = MetricsWriter(tmp_path / "events", tmp_path / "metrics")
    (tmp_path / "metrics").unlink()
    (tmp_path / "metrics").mkdir()
    writer.poll()
    (tmp_path / "metrics").rmdir()
    writer.poll()

    assert len(rows(tmp_path / "metrics")) == 2


def test_other_events_are_no_metrics():
    assert metrics_row({"kind": "ledger"}, started_at=0.0) is None


def test_tensorboard_files_are_written_on_request(tmp_path, story, log_of):
    pytest.importorskip("tensorboard")
    log_of(tmp_path / "events", *story, {"kind": "step", "step": 2, "loss": "nan", "flag": True})

    MetricsWriter(tmp_path / "events", tmp_path / "metrics", tensorboard=tmp_path / "tb").poll()

    (file,) = (tmp_path / "tb").iterdir()
    assert b"train/reward_mean" in file.read_bytes()


def test_a_broken_tensorboard_stops_nothing(tmp_path, story, log_of):
    pytest.importorskip("tensorboard")
    log_of(tmp_path / "events", {"kind": "step", "step": "three", "loss": 1.0})
    writer = MetricsWriter(tmp_path / "events", tmp_path / "metrics", tensorboard=tmp_path / "tb")

    writer.poll()
    log_of(tmp_path / "events", *story)
    writer.poll()

    assert len(rows(tmp_path / "metrics")) == 3


def test_without_tensorboard_there_are_still_metrics(tmp_path, story, log_of, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    log_of(tmp_path / "events", *story)
    MetricsWriter(tmp_path / "events", tmp_path / "metrics", tensorboard=tmp_path / "tb").poll()

    assert len(rows(tmp_path / "metrics")) == 2
