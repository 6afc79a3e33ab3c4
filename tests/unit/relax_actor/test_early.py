"""The short way of a death notice never blocks, and says nothing where there is nobody to hear it."""

import pytest

from relax_actor.actor import wire
from relax_actor.actor.wire import Dying
from relax_actor.node.early import EarlyWord, pair

NOTICE = Dying(name="a", incarnation=1, reason="SIGKILL")


@pytest.fixture
def ends():
    ours, theirs = pair()
    yield ours, EarlyWord(theirs.detach())
    ours.close()


def test_a_word_is_one_datagram(ends):
    ours, word = ends
    word.say(NOTICE)
    word.say(NOTICE)
    assert [wire.decode(ours.recv(65536)) for _ in range(2)] == [NOTICE, NOTICE]
    word.close()


def test_a_word_that_finds_no_room_is_dropped(ends):
    ours, word = ends
    for _ in range(10_000):
        word.say(NOTICE)
    assert wire.decode(ours.recv(65536)) == NOTICE
    word.close()


def test_a_word_that_nobody_hears_is_dropped(ends):
    ours, word = ends
    ours.close()
    word.say(NOTICE)
    word.close()


def test_an_agent_without_a_head_on_its_host_says_nothing():
    word = EarlyWord(-1)
    word.say(NOTICE)
    word.close()
