"""A live view says who speaks, and how much of what it does not show."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import taglog
from launcher.errors import RunFolderError
from launcher.livelog import LiveLog
from launcher.merging import Source
from launcher.runfolder import RunFolder
from launcher.taglog import TaggedLogs, bar, logs
from launcher.tails import Tail, actor_of, source_of

PATH = Path("logs/rollout-0-1.log")
SOURCE = Source(role="rollout", replica=0, incarnation=1)


def test_a_line_carries_who_said_it_and_no_control_characters():
    live = LiveLog()
    live.take(SOURCE, "\x1b[2Jhello", PATH, 0.0)

    assert live.lines(1.0) == ["rollout/0#1 │ \\x1b[2Jhello"]


def test_what_is_beyond_the_limit_is_counted_and_named():
    live = LiveLog(limit_bytes_per_s=10, window_s=0.0)
    for _ in range(5):
        live.take(SOURCE, "12345678", PATH, 0.0)  # 9 bytes with its end
    assert live.lines(0.0) == ["rollout/0#1 │ 12345678"] * 2
    assert live.lines(0.9) == []

    assert live.lines(1.0) == [
        "rollout/0#1 │ … 27 bytes in 3 lines not shown: they are in logs/rollout-0-1.log"
    ]


def test_a_log_that_was_held_back_is_told_of_before_its_next_line():
    live = LiveLog(limit_bytes_per_s=10)
    for line, now in [("a" * 20, 0.0), ("b", 0.1), ("c", 9.0)]:
        live.take(SOURCE, line, PATH, now)

    assert [line.partition("│ ")[2][:9] for line in live.flush(9.0)] == ["aaaaaaaaa", "… 2 bytes", "c"]


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.3, 2.0])), max_size=40))
def test_every_byte_is_shown_or_counted(lines):
    live, now, shown = LiveLog(limit_bytes_per_s=20), 0.0, []
    for size, later in lines:
        now += later
        live.take(SOURCE, "x" * size, PATH, now)
        shown += live.lines(now)
    shown += live.flush(now)

    texts = [line.partition("│ ")[2] for line in shown]
    held = sum(int(text.split()[1].replace(",", "")) for text in texts if text.startswith("…"))
    kept = sum(len(text) + 1 for text in texts if not text.startswith("…"))
    assert held + kept == sum(size + 1 for size, _ in lines)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(str(tmp_path / "run"), name="x")
    folder.events.touch()
    return folder


@pytest.fixture
def log_files(folder):
    folder.log_path("rollout/0", 1).write_text("a1\na2\n")
    folder.log_path("rollout/0", 2).write_text("b1\nhalf a line")
    folder.log_path("rollout/10", 1).write_text("c1\n")
    folder.log_path("trainer", 1).write_bytes(b"\xff\x1b[2J\n")
    (folder.logs / "agent.log").write_text("x\n")


def said(*args, **options) -> str:
    out = io.StringIO()
    logs(args[0], out, *args[1:], **options)
    return out.getvalue()


def test_log_lines_carry_actor_and_incarnation(folder, log_files):
    assert said(folder).splitlines() == [
        "rollout/0#1 │ a1",
        "rollout/0#1 │ a2",
        "rollout/0#2 │ b1",
        "rollout/10#1 │ c1",
        "trainer#1 │ \\xff\\x1b[2J",
    ]


@pytest.mark.parametrize("actor", ["rollout/0", "rollout-0"])
def test_logs_of_one_actor(folder, log_files, actor):
    assert said(folder, actor=actor, last=1).splitlines() == ["rollout/0#1 │ a2", "rollout/0#2 │ b1"]


def test_logs_of_a_role_are_those_of_all_its_replicas(folder, log_files):
    assert "rollout/10#1 │ c1" in said(folder, actor="rollout")


def test_an_actor_without_a_log_is_an_error_with_the_nearest_name(folder, log_files):
    with pytest.raises(RunFolderError, match="did you mean rollout"):
        said(folder, actor="rollot")
    with pytest.raises(RunFolderError, match="there are rollout/0, rollout/10, trainer"):
        said(folder, actor="zzz")


def test_logs_of_a_run_that_has_none_yet(folder):
    with pytest.raises(RunFolderError, match="no actor has been started yet"):
        said(folder)


def test_only_the_last_lines_of_a_long_log_are_read(folder):
    folder.log_path("trainer", 1).write_text("".join(f"{n}\n" for n in range(100_000)))

    assert said(folder, last=2).splitlines() == ["trainer#1 │ 99998", "trainer#1 │ 99999"]
    assert said(folder, last=0) == ""


def test_following_a_run_that_is_over_ends_at_once(folder):
    assert said(folder, follow=True) == ""


def test_following_sees_growth_and_new_incarnations_and_merges_them(folder, monkeypatch):
    monkeypatch.setattr(taglog, "POLL_S", 0.0)
    for number in range(2):
        folder.log_path(f"rollout/{number}", 1).write_text("one\ntw")

    class Running:
        """A run that writes while it is followed, and then ends."""

        def __init__(self, _folder) -> None:
            self.is_running, self.looks = True, 0

        def refresh(self) -> None:
            for number in range(2):
                with folder.log_path(f"rollout/{number}", 1).open("a") as file:
                    file.write("" if self.looks else "o\n")
            folder.log_path("trainer", 2).write_text("three\n")
            self.looks += 1
            self.is_running = self.looks < 2

    monkeypatch.setattr(taglog, "RunView", Running)

    assert said(folder, follow=True).splitlines() == [
        "rollout/0#1 │ one",
        "rollout/1#1 │ one",
        "rollout/{0-1}#1 │ two",
        "trainer#2 │ three",
    ]


def test_the_launcher_shows_what_is_written_from_its_start_on(folder):
    log = folder.log_path("trainer", 1)
    log.write_text("of an earlier launch\n")
    out = io.StringIO()
    tagged = TaggedLogs(folder, out)
    tagged.tick()
    with log.open("a") as file:
        file.write("new\n")
    tagged.tick()  # not due yet
    tagged.close()

    assert out.getvalue() == "trainer#1 │ new\n"


def test_a_stream_that_cannot_show_the_bar_gets_a_plain_one():
    assert bar(io.TextIOWrapper(io.BytesIO(), encoding="latin-1")) == "|"


def test_a_line_that_never_ends_is_shown_in_pieces(folder):
    log = folder.log_path("trainer", 1)
    log.write_text("x" * 70_000)

    assert [len(line) for line in Tail(log, None).lines()] == [70_000]


def test_a_log_name_is_an_actor_and_its_incarnation(folder):
    assert str(source_of(folder.log_path("trainer", 3))) == "trainer#3"
    assert str(source_of(folder.log_path("rollout/12", 3))) == "rollout/12#3"
    assert str(source_of(Path("odd-name.log"))) == "odd#0"
    assert actor_of(folder.log_path("rollout/12", 3)) == "rollout/12"
