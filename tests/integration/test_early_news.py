"""A death that is felt on the head's host fails the head's calls before anything comes over the line."""

import tempfile
from pathlib import Path

import pytest

from relax_actor import Actor, endpoint
from relax_actor.actor.courier import Courier
from relax_actor.actor.ref import Ref
from relax_actor.actor.wire import Dying, PeerUp, Stop
from relax_actor.errors import ActorDied
from relax_actor.ids import Holder
from relax_actor.node.early import EarlyWord, pair
from transport.address import Address


class Somebody(Actor):
    @endpoint
    def one(self) -> int:
        return 1


@pytest.fixture
def courier():
    with tempfile.TemporaryDirectory() as folder:
        courier = Courier(Holder("head", 1), "run/1", Address.ipc(Path(folder) / "head"))
        courier.start()
        courier.peer_up(PeerUp(name="a", incarnation=2, address=str(Address.ipc(Path(folder) / "a"))))
        yield courier
        courier.stop()


@pytest.fixture
def word(courier):
    ours, theirs = pair()
    courier.hear_early(ours)
    word = EarlyWord(theirs.detach())
    yield word
    word.close()


def test_a_word_fails_the_calls_in_hand(courier, word):
    reply = Ref("a", courier.caller).ask(Somebody.one)
    word.say(Dying(name="a", incarnation=2, reason="SIGKILL"))
    with pytest.raises(ActorDied, match="SIGKILL"):
        reply.result(20)


def test_a_word_about_another_incarnation_or_another_matter_changes_nothing(courier, word):
    reply = Ref("a", courier.caller).ask(Somebody.one)
    word.say(Stop(reason="not a death"))
    word.say(Dying(name="nobody", incarnation=1, reason="SIGKILL"))
    word.say(Dying(name="a", incarnation=1, reason="SIGSEGV"))
    word.say(Dying(name="a", incarnation=2, reason="SIGKILL"))
    with pytest.raises(ActorDied, match="SIGKILL"):
        reply.result(20)


def test_the_end_of_the_agent_ends_the_words(courier, word):
    word.close()
    reply = Ref("a", courier.caller).ask(Somebody.one, timeout_s=0.3)
    with pytest.raises(Exception, match="one"):
        reply.result(20)
