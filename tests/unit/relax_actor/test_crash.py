"""What is kept of an abnormal end, whatever is missing."""

import json
import threading

import pytest

from relax_actor.files import log_tail
from relax_actor.supervision import crash
from relax_actor.supervision.crash import CrashGatherer, Death, gather
from relax_actor.supervision.events import Exit, ExitKind

KILLED = Exit(kind=ExitKind.SIGNAL, signal=9)
DUMP = 'Thread 0x7f (most recent call first):\n  File "a.py", line 3 in f\n'


@pytest.fixture
def death(tmp_path):
    def make(exit_: Exit = KILLED, incarnation: int = 2) -> Death:
        return Death(
            name="rollout/3",
            incarnation=incarnation,
            pid=4711,
            exit=exit_,
            log=tmp_path / "rollout-3-2.log",
            crash=tmp_path / f"rollout-3-{incarnation}",
        )

    return make


def test_the_death_line_says_who_how_in_what_and_where_to_read_on(death, monkeypatch):
    one = death()
    assert one.line == f"rollout/3 (incarnation 2, pid 4711) died: SIGKILL; log: {one.log}"

    one.log.write_text(f"loading\nlast words\n\n{DUMP}")
    one.page.write_text('{"method": "generate", "call_id": 812, "method_since_s": 5.8}')
    monkeypatch.setattr(crash.time, "monotonic", lambda: 20.0)
    assert one.line == (
        "rollout/3 (incarnation 2, pid 4711) died: SIGKILL, 14.2 s into generate (call 812); "
        f'last log: "last words"; log: {one.log}'
    )


@pytest.mark.parametrize(
    "page", ["", "[]", "{}", '{"method": "", "call_id": 1, "method_since_s": 0}', '{"method']
)
def test_a_page_that_says_nothing_adds_nothing_to_the_line(death, page):
    one = death()
    one.page.write_text(page)
    assert "SIGKILL; log" in one.line


def test_the_crash_folder_holds_all_that_there_is(death, tmp_path, monkeypatch):
    one = death()
    one.log.write_text("".join(f"line {n}\n" for n in range(300)) + DUMP)
    one.traceback.write_text("Traceback\n")
    one.page.write_text("{}")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho two cards\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    gather(one, "the line", 1000.0)

    names = {path.name: path.read_text() for path in one.crash.iterdir()}
    assert set(names) == {
        "exit.json",
        "traceback.txt",
        "page.json",
        "stacks.txt",
        "log.txt",
        "memory.txt",
        "nvidia-smi.txt",
    }
    facts = json.loads(names["exit.json"])
    assert (facts["signal"], facts["exit"], facts["line"], facts["t"]) == (9, "signal", "the line", 1000.0)
    assert (names["traceback.txt"], names["stacks.txt"]) == ("Traceback\n", DUMP)
    assert len(names["log.txt"].splitlines()) == crash.LOG_LINES
    assert "MemAvailable" in names["memory.txt"]
    assert names["nvidia-smi.txt"] == "two cards\n"


def test_what_cannot_be_had_is_named_and_the_rest_is_there(death, monkeypatch):
    def fails() -> str:
        raise OSError("no such device")

    monkeypatch.setattr(crash, "_nvidia_smi", fails)
    one = death()
    gather(one, "the line", 1000.0)
    assert (one.crash / "missing.txt").read_text() == "nvidia-smi.txt: OSError: no such device\n"
    assert (one.crash / "exit.json").exists()


def test_a_folder_that_cannot_be_made_harms_nobody(death):
    one = death()
    one.crash.write_text("a file is in the way")
    gather(one, "the line", 1000.0)


def test_without_nvidia_smi_or_cgroup_v2_there_is_less(death, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    one = death()
    gather(one, "", 0.0)
    assert not (one.crash / "nvidia-smi.txt").exists()
    monkeypatch.setattr(crash.Path, "read_text", lambda *_: "12:memory:/x\n")
    assert str(crash._cgroup()) == "/sys/fs/cgroup"
    monkeypatch.setattr(crash.Path, "read_text", lambda *_: "0::/a/b\n")
    assert str(crash._cgroup()) == "/sys/fs/cgroup/a/b"


def test_only_abnormal_ends_are_gathered_and_a_storm_of_them_is_bounded(death, monkeypatch):
    gathered, go = [], threading.Event()
    monkeypatch.setattr(crash, "gather", lambda *args: (go.wait(60), gathered.append(args)))
    monkeypatch.setattr(crash, "MAX_WAITING", 2)
    gatherer = CrashGatherer()
    gatherer.gather(death(Exit(kind=ExitKind.NORMAL, code=0)), "")
    for incarnation in range(50):
        gatherer.gather(death(incarnation=incarnation), "line")
    go.set()
    gatherer.close()
    assert len(gathered) == 2


def test_of_a_long_log_only_the_end_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100 + b"\nlast \xff\n")
    assert log_tail(log, 7) == ["last \\xff"]
    assert log_tail(tmp_path / "missing") == []
