"""Questions of observers: each answer goes to who asked, under the number it was asked by."""

import pytest

from relax_actor.actor.wire import Look, Seen
from relax_actor.supervision import sights
from relax_actor.supervision.sights import Sights


def look(number: int, host: str = "a") -> Look:
    return Look(id=number, host=host, name="counter", incarnation=2, wants_stacks=True)


class Head:
    """Agents that hear, on host a only, and observers that are told."""

    def __init__(self) -> None:
        self.asked: list[Look] = []
        self.told: list[tuple[bytes, Seen]] = []
        self.sights = Sights(self._ask, lambda peer, seen: self.told.append((peer, seen)))

    def _ask(self, host: str, record: Look) -> bool:
        self.asked.append(record)
        return host == "a"


@pytest.fixture
def head() -> Head:
    return Head()


def test_two_observers_may_use_the_same_numbers(head) -> None:
    head.sights.ask(b"x", look(7))
    head.sights.ask(b"y", look(7))
    first, second = head.asked
    assert first.id != second.id
    head.sights.answered(Seen(id=second.id, sight=b"2"))
    head.sights.answered(Seen(id=first.id, sight=b"1"))
    assert head.told == [(b"y", Seen(id=7, sight=b"2")), (b"x", Seen(id=7, sight=b"1"))]


def test_a_host_without_an_agent_is_answered_for_at_once(head) -> None:
    head.sights.ask(b"x", look(7, "b"))
    assert head.told == [(b"x", Seen(id=7))]


def test_an_answer_that_nobody_waits_for_goes_nowhere(head) -> None:
    head.sights.answered(Seen(id=1))
    assert head.told == []


def test_questions_that_nobody_answers_are_forgotten_oldest_first(head, monkeypatch) -> None:
    monkeypatch.setattr(sights, "MAX_ASKED", 2)
    for number in range(3):
        head.sights.ask(b"x", look(number))
    for asked in head.asked:
        head.sights.answered(Seen(id=asked.id))
    assert [seen.id for _, seen in head.told] == [1, 2]
