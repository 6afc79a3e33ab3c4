"""The event log is written by many, never raises, and is read whatever it looks like."""

import dataclasses
import enum
import json
import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor import telemetry
from relax_actor.ids import Holder
from relax_actor.telemetry import EventLog, follow, read_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def log(path: Path):
    log = EventLog(path, "rollout/3", 2)
    yield log
    log.close()


def only(path: Path) -> dict:
    (event,) = read_events(path)[0]
    return event


def test_an_event_says_when_who_and_what(log, path):
    log.emit("step", step=3)

    event = only(path)
    assert list(event) == ["t", "m", "actor", "inc", "pid", "kind", "step"]
    assert (event["actor"], event["inc"], event["pid"], event["step"]) == ("rollout/3", 2, os.getpid(), 3)


def test_an_event_about_another_process_says_that_pid(log, path):
    log.emit("child_spawned", pid=7)

    assert only(path)["pid"] == 7


class Colour(enum.StrEnum):
    RED = "red"


class Bad:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@dataclasses.dataclass
class Point:
    x: int


RECURSIVE: list = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float32("inf"), "inf"),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),  # noqa: FBT003 - the value under test
        (np.arange(3), [0, 1, 2]),
        (Path("/a/b"), "/a/b"),
        (b"a\xff", "a\\xff"),
        (bytearray(b"a"), "a"),
        (Colour.RED, "red"),
        (ValueError("x"), "ValueError: x"),
        (Holder("a", 1), {"name": "a", "incarnation": 1}),
        (Point(1), "Point(x=1)"),
        ((1, {2: None}), [1, {"2": None}]),
        ({3}, [3]),
        ("\ud83d\0\u202e", "\ud83d\0\u202e"),
        (Bad(), "<Bad: RuntimeError while it was encoded>"),
        (RECURSIVE, "<list: RecursionError while it was encoded>"),
        (10**5000, "<int: ValueError while it was encoded>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_written_as_something(log, path, value, written):
    log.emit("x", value=value, other=1)

    event = only(path)
    assert event["value"] == written
    assert event["other"] == 1
    assert path.read_bytes().isascii()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_plain_data_comes_back_as_it_was(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("log") / "e"
    log = EventLog(path, "a", 1)
    log.emit("x", value=value)
    log.close()

    assert only(path)["value"] == value


def test_a_span_says_start_and_duration_and_takes_more_fields(log, path):
    before_s, since_s = time.time(), time.monotonic()
    with log.span("train", step=1) as fields:
        fields["tokens"] = 5

    event = only(path)
    assert (event["kind"], event["name"], event["step"], event["tokens"]) == ("span", "train", 1, 5)
    assert 0 <= event["dur_s"] <= time.monotonic() - since_s
    assert before_s <= event["start"] <= event["t"] + 1e-6


def test_a_span_that_fails_is_written_and_raises(log, path):
    with pytest.raises(KeyError), log.span("train"):
        raise KeyError

    assert only(path)["error"] == "KeyError"


def test_events_wait_while_the_file_cannot_be_written(tmp_path):
    path = tmp_path / "later" / "events.jsonl"
    log = EventLog(path, "a", 1)
    log.emit("first")
    log.emit("second")
    assert log.failed_writes == 2

    path.parent.mkdir()
    log.emit("third")
    log.close()

    assert [event["kind"] for event in read_events(path)[0]] == ["first", "second", "third"]


def test_a_full_disk_raises_nothing_and_is_counted():
    log = EventLog(Path("/dev/full"), "a", 1)

    log.emit("x")
    log.close()

    assert log.failed_writes == 2


def test_the_oldest_of_too_many_waiting_events_are_lost_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "KEPT_LINES", 2)
    log = EventLog(tmp_path / "no" / "e", "a", 1)
    for _ in range(5):
        log.emit("x")

    assert log.lost_events == 3


def test_after_a_torn_line_the_next_events_are_whole(log, path, monkeypatch):
    write, room = os.write, [5, 0]
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: room.pop(0)] if room else data))

    log.emit("first")
    log.emit("second")
    log.emit("third")

    assert log.failed_writes == 2
    assert [event["kind"] for event in read_events(path)[0]] == ["first", "second", "third"]


def test_lines_of_many_writers_never_mix(path):
    def write(name: str) -> None:
        log = EventLog(path, name, 1)
        for n in range(100):
            log.emit("x", n=n, padding="y" * 3000)
        log.close()

    threads = [threading.Thread(target=write, args=(f"rollout/{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    events, _ = read_events(path)
    assert len(events) == 400
    for n in range(4):
        assert [event["n"] for event in events if event["actor"] == f"rollout/{n}"] == list(range(100))


def test_a_log_goes_on_after_it_was_closed(log, path):
    log.emit("a")
    log.close()
    log.close()
    log.emit("b")

    assert len(read_events(path)[0]) == 2


def test_a_torn_last_line_is_left_for_the_next_read(path):
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b"')
    events, offset = read_events(path)
    assert [event["kind"] for event in events] == ["a"]

    with path.open("ab") as file:
        file.write(b"}\n")
    events, offset = read_events(path, offset)

    assert [event["kind"] for event in events] == ["b"]
    assert read_events(path, offset) == ([], path.stat().st_size)


def test_lines_that_are_no_events_are_skipped(path):
    deep = b"[" * 100_000
    path.write_bytes(b'\n{"kind":"a"}\nrubbish\n[1]\n\xff\n' + deep + b'\n{"kind":"b"}\n')

    assert [event["kind"] for event in read_events(path)[0]] == ["a", "b"]


def test_a_missing_log_is_an_empty_one(path):
    assert read_events(path, 5) == ([], 5)


def test_a_log_shorter_than_the_offset_is_read_anew(path):
    path.write_bytes(b'{"kind":"a"}\n')

    assert len(read_events(path, 1000)[0]) == 1


def test_following_yields_what_is_written_until_it_is_told_to_stop(log, path):
    stopping = threading.Event()
    events = follow(path, poll_s=0.001, stop=stopping.is_set)
    log.emit("a")
    first = next(events)
    log.emit("b")
    stopping.set()

    assert [first["kind"], *(event["kind"] for event in events)] == ["a", "b"]


def test_following_waits_for_a_log_that_does_not_exist_yet(path):
    looks = iter([False, False, True])

    assert list(follow(path, poll_s=0.001, stop=lambda: next(looks))) == []


def test_structs_and_json_agree(log, path):
    class Record(msgspec.Struct):
        value: float

    log.emit("x", record=Record(float("nan")))

    assert json.loads(path.read_text())["record"] == {"value": "nan"}
