"""How ranks come together: rank 0 first, then the others; and nobody is sent to an old epoch's place."""

import importlib.util
import socket

import pytest

from relax_actor.actor import store, wire
from relax_actor.supervision.commands import GangAbort, Regroup
from relax_actor.supervision.meetings import Meetings


def order(rank: int, epoch: int = 1, gang: str = "g") -> Regroup:
    return Regroup(name=f"{gang}/{rank}", incarnation=epoch, gang=gang, epoch=epoch, rank=rank, size=3)


def meeting(rank: int = 0, epoch: int = 1, gang: str = "g") -> wire.Meeting:
    return wire.Meeting(
        name=f"{gang}/{rank}", incarnation=epoch, epoch=epoch, rendezvous=f"tcp://{gang}:{epoch}"
    )


class Told:
    """Meetings, and what was said to whom."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.meetings = Meetings(lambda key, record: self.said.append((key[0], record.rendezvous)))

    def form(self, epoch: int = 1, gang: str = "g") -> None:
        for rank in range(3):
            self.meetings.regroup(order(rank, epoch, gang))


@pytest.fixture
def told() -> Told:
    return Told()


def test_rank_0_is_told_at_once_and_the_others_when_it_has_answered(told) -> None:
    told.form()
    assert told.said == [("g/0", "")]
    told.meetings.opened(meeting())
    assert told.said[1:] == [("g/1", "tcp://g:1"), ("g/2", "tcp://g:1")]


def test_an_answer_is_good_once_and_for_its_own_gang(told) -> None:
    told.form()
    told.form(gang="h")
    told.meetings.opened(meeting(gang="h"))
    told.meetings.opened(meeting(gang="h"))
    assert [name for name, _ in told.said] == ["g/0", "h/0", "h/1", "h/2"]


def test_what_an_older_epochs_rank_0_says_leads_nobody_anywhere(told) -> None:
    told.form()
    told.form(epoch=2)
    told.meetings.opened(meeting(epoch=1))
    assert [name for name, _ in told.said] == ["g/0", "g/0"]
    told.meetings.opened(meeting(epoch=2))
    assert told.said[2:] == [("g/1", "tcp://g:2"), ("g/2", "tcp://g:2")]


@pytest.mark.parametrize("survivor", [0, 2])
def test_an_epoch_that_broke_before_all_had_joined_is_forgotten(told, survivor: int) -> None:
    told.form()
    told.meetings.abort(GangAbort(name=f"g/{survivor}", incarnation=1, epoch=1, reason="x"))
    told.meetings.opened(meeting())
    assert told.said == [("g/0", "")]


def test_the_break_of_another_epoch_or_gang_changes_nothing(told) -> None:
    told.form(epoch=2)
    told.meetings.abort(GangAbort(name="g/1", incarnation=1, epoch=1, reason="x"))
    told.meetings.abort(GangAbort(name="h/1", incarnation=1, epoch=2, reason="x"))
    told.meetings.opened(meeting(epoch=2))
    assert len(told.said) == 3


def test_without_torch_there_is_no_store(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert store.open_store("127.0.0.1") == ("", None)


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_a_store_listens_where_its_address_says(host: str, shown: str) -> None:
    address, opened = store.open_store(host)
    assert address == f"tcp://{shown}:{opened.port}"
    socket.create_connection((host, opened.port), timeout=5).close()


def test_a_store_cannot_be_opened_for_another_host() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        store.open_store("192.0.2.1")
