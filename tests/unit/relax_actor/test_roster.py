"""Who there is in a tree, under which names; and threads that wait for the tree."""

import threading

import pytest

from relax_actor.actor.wire import Ready, SpareReady, Spawned
from relax_actor.supervision.changes import Changes
from relax_actor.supervision.roster import Roster


def test_who_was_spawned_has_a_pid_until_it_is_gone() -> None:
    roster = Roster()
    assert roster.pid("a") is None
    roster.spawned(Spawned(name="a", incarnation=2, pid=7))
    assert roster.pid("a") == 7
    assert roster.gone(("a", 2)) == 7
    assert roster.pid("a") is None
    assert roster.gone(("a", 2)) == 0


@pytest.mark.parametrize("word", [Ready(name="a", incarnation=1), SpareReady(name="a")])
def test_who_says_it_is_ready_before_its_agent_says_it_exists_is_ready_then(word) -> None:
    """A zygote's child is quick: its own word may come before that of an agent which is busy."""
    roster = Roster()
    assert roster.is_ahead(word)
    assert roster.spawned(Spawned(name="a", incarnation=1, pid=7)) == word
    assert not roster.is_ahead(word)

    assert roster.spawned(Spawned(name="a", incarnation=2, pid=8)) is None


def test_the_word_of_who_is_gone_is_forgotten() -> None:
    roster = Roster()
    roster.is_ahead(Ready(name="a", incarnation=1))
    roster.gone(("a", 1))
    assert roster.spawned(Spawned(name="a", incarnation=1, pid=7)) is None


def test_who_is_gone_is_not_dying_any_more() -> None:
    roster = Roster()
    roster.dying.add(("a", 1))
    roster.gone(("a", 1))
    assert not roster.dying


def test_a_promoted_spare_is_known_by_both_its_names() -> None:
    roster = Roster()
    roster.spawned(Spawned(name="a/SPARE/1", incarnation=1, pid=7))
    assert roster.as_spare(("a", 3)) is None

    born = roster.promoted(("a/SPARE/1", 1), ("a", 3))

    assert (born.name, born.incarnation, born.pid) == ("a", 3, 7)
    assert (roster.pid("a"), roster.pid("a/SPARE/1")) == (7, None)
    assert roster.as_spare(("a", 3)) == ("a/SPARE/1", 1)
    assert roster.name_of("a/SPARE/1", 1) == ("a", 3)
    roster.gone(("a", 3))
    assert roster.name_of("a/SPARE/1", 1) == ("a/SPARE/1", 1)


def test_a_wait_ends_when_its_condition_holds_or_its_time_is_over() -> None:
    changes, facts = Changes(), []
    assert not changes.wait_for(lambda: bool(facts), 0.0)
    waits = threading.Thread(target=changes.wait_for, args=(lambda: bool(facts), None))
    waits.start()
    facts.append("ready")
    changes.tell()
    waits.join(60)
    assert not waits.is_alive()
    assert changes.wait_for(lambda: bool(facts), 10.0)
