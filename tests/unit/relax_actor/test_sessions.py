"""What goes over a session to a remote host: the word, records, files as they grow; and who may begin one."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.node import handover
from relax_actor.node.handover import EVENTS, Handover
from relax_actor.node.inband import (
    MAX_NOISE_BYTES,
    Began,
    Boot,
    Ended,
    Grown,
    Refused,
    Unframer,
    framed,
    greeting,
    read_boot,
)
from relax_actor.supervision.gate import Gate
from relax_actor.supervision.hosts import Host, Session
from relax_actor.supervision.intake import Files
from transport.errors import CodecError

RECORDS = [
    Began(version="1", python="3.11.2", node="node1", pid=7),
    Refused(kind="setup", fact="it failed"),
    Grown(path="logs/a-1.log", data=bytes(range(256)), offset=256),
    Ended(code=0),
]
SAID = b"".join(map(framed, RECORDS))


@given(noise=st.binary(max_size=300), cuts=st.lists(st.integers(1, 40), max_size=60))
def test_records_come_out_whole_however_the_bytes_are_cut_and_whatever_comes_before(noise, cuts):
    unframer, data, found = Unframer("word"), noise + greeting("word") + SAID, []
    for cut in cuts:
        found += unframer.feed(data[:cut])
        data = data[cut:]
    assert [*found, *unframer.feed(data)] == RECORDS
    assert unframer.noise == noise


def test_noise_without_an_end_is_kept_within_bounds():
    unframer = Unframer("word")
    for _ in range(20):
        assert not list(unframer.feed(b"x" * MAX_NOISE_BYTES))
    assert unframer.noise == b"x" * MAX_NOISE_BYTES


def test_another_starts_word_is_noise():
    assert not list(Unframer("word").feed(greeting("another") + SAID))


@pytest.mark.parametrize("rubbish", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc"])
def test_what_is_no_record_is_refused(rubbish):
    with pytest.raises(CodecError, match="a record of another host"):
        list(Unframer("word").feed(greeting("word") + rubbish))


def test_a_head_of_another_kind_is_refused():
    boot = Boot(word="w", env=((b"A", b"\xff"),))
    assert read_boot(framed(boot)[4:]) == boot
    with pytest.raises(CodecError, match="what the head sent first"):
        read_boot(b"\x93abc")


def test_secrets_are_not_shown():
    assert "hush" not in repr(Boot(env=((b"KEY", b"hush"),))) + repr(Session(env=((b"KEY", b"hush"),)))


def test_only_a_host_with_a_session_and_a_way_to_it_hands_over():
    there, session = ("ssh", "node1"), Session()
    assert Host(name="a", prefix=there, session=session).is_handed_over
    assert not Host(name="a", prefix=there).is_handed_over
    assert not Host(name="a", session=session).is_handed_over


def test_a_gate_lets_in_so_many_at_a_time_in_their_order():
    inside = []
    gate = Gate(2, inside.append)
    for who in "abcd":
        gate.enter(who)
    assert inside == ["a", "b"]
    gate.leave("b")
    gate.leave("b")
    assert inside == ["a", "b", "c"]
    gate.close()
    gate.leave("a")
    assert inside == ["a", "b", "c"]


@pytest.fixture
def far(tmp_path):
    """Return the folder of a remote host."""
    folder = tmp_path / "far"
    for name in ("logs", "crash"):
        (folder / name).mkdir(parents=True)
    return folder


@pytest.fixture
def files(tmp_path):
    """Return the head's copies."""
    return Files(tmp_path / "head")


def test_files_are_handed_over_as_they_grow_and_events_by_whole_lines(far, files, tmp_path):
    (far / EVENTS).write_bytes(b'{"kind":"old"}\n')
    one = Handover(far, None, files.take)
    assert files.offsets == {EVENTS: 15}
    with (far / EVENTS).open("ab") as events, (far / "logs" / "a-1.log").open("ab", buffering=0) as log:
        events.write(b'{"kind":"new"}\n{"kind":"to')
        events.flush()
        log.write(b"half a li")
        assert one.one_round()
        assert (tmp_path / "head" / EVENTS).read_bytes() == b'{"kind":"new"}\n'
        events.write(b'rn"}\n')
        log.write(b"ne\n")
    (far / "logs" / "empty-1.log").touch()
    (far / "logs" / "alias.log").symlink_to("a-1.log")
    one.one_round()
    assert not one.one_round()
    assert (tmp_path / "head" / EVENTS).read_bytes() == b'{"kind":"new"}\n{"kind":"torn"}\n'
    assert sorted(path.name for path in (tmp_path / "head" / "logs").iterdir()) == ["a-1.log", "empty-1.log"]
    assert (tmp_path / "head" / "logs" / "a-1.log").read_bytes() == b"half a line\n"


def test_another_agent_goes_on_where_the_last_one_was(far, files, tmp_path):
    log = far / "crash" / "a-1.txt"
    log.write_text("one ")
    files.begin()
    Handover(far, files.offsets, files.take).one_round()
    with log.open("a") as file:
        file.write("two")
    Handover(far, files.offsets, files.take).one_round()
    assert (tmp_path / "head" / "crash" / "a-1.txt").read_text() == "one two"


def test_a_torn_event_is_ended_once_nobody_writes_any_more(far, files, tmp_path):
    (far / EVENTS).write_bytes(b'{"kind":"whole"}\n{"ki')
    one = Handover(far, {}, files.take)
    one.one_round(is_last=True)
    assert (tmp_path / "head" / EVENTS).read_bytes() == b'{"kind":"whole"}\n{"ki\n'
    assert not one.one_round(is_last=True)


def test_an_event_that_is_longer_than_a_piece_is_handed_over_whole(far, monkeypatch):
    monkeypatch.setattr(handover, "PIECE_BYTES", 16)
    (far / EVENTS).write_bytes(b"x" * 100 + b"\n" + b"y" * 10 + b"\n")
    said = []
    Handover(far, {}, said.append).one_round()
    assert b"".join(grown.data for grown in said) == (far / EVENTS).read_bytes()
    assert all(grown.data.endswith(b"\n") for grown in said)


def test_a_log_that_is_far_behind_is_cut_in_its_middle(far, files, tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "LOG_BACKLOG_BYTES", 1000)
    monkeypatch.setattr(handover, "LOG_KEPT_BYTES", 100)
    (far / "logs" / "a-1.log").write_bytes(b"x" * 5000)
    one = Handover(far, {}, files.take)
    while one.one_round():
        pass
    text = (tmp_path / "head" / "logs" / "a-1.log").read_text()
    assert "4,900 bytes were not handed over: they are in " in text
    assert text.endswith("x" * 100)
    assert len(text) < 400


@pytest.mark.parametrize(
    "path", ["../up", "/etc/passwd", "logs/../../up", "logs/a/b", "resolved.toml", "logs", "checkpoints/x"]
)
def test_a_host_writes_only_where_its_files_belong(files, tmp_path, path):
    files.take(Grown(path=path, data=b"x", offset=1))
    assert not list((tmp_path).rglob("*"))


def test_a_disk_that_is_full_is_waited_for(files, tmp_path, monkeypatch):
    real, tries = os.write, []

    def full_at_first(fd, data):
        tries.append(len(data))
        if len(tries) < 3:
            raise OSError(28, "full")
        return real(fd, data[:2])

    monkeypatch.setattr("relax_actor.supervision.intake._FULL_DISK_S", 0.0)
    monkeypatch.setattr(os, "write", full_at_first)
    files.take(Grown(path=EVENTS, data=b"abcdef", offset=6))
    monkeypatch.undo()
    assert (tmp_path / "head" / EVENTS).read_bytes() == b"abcdef"
