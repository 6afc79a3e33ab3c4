"""Who is in a group of stores and when it is formed, and whose words are believed in one."""

import pytest

from relax_actor.dcs.relay.chain import Chain
from relax_actor.dcs.relay.group import (
    FRESH_S,
    GATHER_S,
    KEY_BYTES,
    WORD_BYTES,
    Desk,
    GroupWordError,
    Kind,
    Seat,
    Word,
    signed,
    unsigned,
)
from relax_actor.ids import Holder, PolicyVersion

B, C, D = (Holder(name, 1) for name in "bcd")
KEY = b"k" * KEY_BYTES


def desk_of(*holders, now=0.0):
    """A desk of `b`, `c` and `d`, at which these have asked."""
    desk = Desk(["b", "c", "d"])
    for holder in holders:
        desk.ask(holder, 4, 4, now)
    return desk


def test_a_group_is_formed_at_once_of_all_in_the_order_of_the_chain():
    assert desk_of(D, B, C).due(0.0) == (B, C, D)


def test_whoever_is_not_there_is_waited_for_and_then_done_without():
    desk = desk_of(C)
    assert desk.due(GATHER_S - 0.01) == ()
    assert desk.due(GATHER_S) == (C,)


def test_there_is_no_group_of_the_lead_alone():
    assert desk_of().due(1e9) == ()


def test_who_stopped_asking_is_not_there():
    desk = desk_of(B, C)
    desk.ask(C, 4, 4, FRESH_S)
    assert desk.due(FRESH_S + GATHER_S) == (C,)


def test_who_comes_back_after_a_while_is_waited_with_anew():
    desk = desk_of(B)
    desk.ask(B, 4, 4, 10.0)
    assert desk.due(10.0) == ()
    assert desk.due(10.0 + GATHER_S) == (B,)


def test_who_lacks_a_version_pulls_it_along_the_chain_first():
    desk = desk_of(B)
    desk.ask(C, 3, 4, 0.0)
    assert desk.due(GATHER_S) == (B,)


def test_a_stranger_gets_no_seat():
    assert desk_of(Holder("x", 1)).due(1e9) == ()


def test_a_group_begins_with_what_all_of_it_have_and_epochs_only_rise():
    desk = desk_of()
    for epoch in (1, 2):
        desk.ask(B, 6, 6, 0.0)
        desk.ask(C, 5, 5, 0.0)
        assert desk.form((B, C)) == 5
        assert (desk.epoch, desk.seated) == (epoch, (B, C))
        desk.dissolve(0.0, was_useful=True)
        assert desk.seated == ()


def test_a_group_that_there_is_is_not_formed_again_until_it_ended():
    desk = desk_of(B, C, D)
    desk.form((B, C, D))
    for holder in (B, C, D):
        desk.ask(holder, 4, 4, 1.0)
    assert desk.due(1.0) == ()
    desk.dissolve(1.0, was_useful=True)
    assert desk.due(1.0) == ()
    for holder in (B, C, D):
        desk.ask(holder, 4, 4, 1.1)
    assert desk.due(1.1) == (B, C, D)


def test_who_is_new_outgrows_the_group_once_up_to_date():
    desk = desk_of(B, C)
    desk.form((B, C))
    assert not desk.is_outgrown(0.0)
    desk.ask(D, 3, 4, 0.0)
    assert not desk.is_outgrown(0.0)
    desk.ask(D, 4, 4, 0.0)
    assert desk.is_outgrown(0.0)
    assert not desk.is_outgrown(FRESH_S)


def test_another_incarnation_of_a_member_is_new():
    desk = desk_of(B, C)
    desk.form((B, C))
    desk.ask(Holder("b", 2), 4, 4, 0.0)
    assert desk.is_outgrown(0.0)


def test_members_that_ask_late_after_a_group_ended_are_waited_for():
    desk = desk_of(B, C)
    desk.form((B, C))
    desk.ask(D, 4, 4, 5.0)
    desk.ask(D, 4, 4, 5.9)
    desk.dissolve(5.9, was_useful=True)
    assert desk.due(5.9) == ()
    desk.ask(B, 4, 4, 6.0)
    desk.ask(C, 4, 4, 6.0)
    assert desk.due(6.0) == (B, C, D)


def test_after_groups_that_were_of_no_use_there_is_a_rest_that_doubles_up_to_a_limit():
    desk, now, rests = desk_of(), 0.0, []
    for _ in range(8):
        desk.ask(B, 4, 4, now)
        desk.form((B,))
        desk.dissolve(now, was_useful=False)
        ended = now
        while not desk.due(now):
            now += 0.125
            desk.ask(B, 4, 4, now)
        rests.append(now - ended)
    assert rests == [0.5, 1, 2, 4, 8, 16, 30, 30]
    desk.form((B,))
    desk.dissolve(now, was_useful=True)
    desk.ask(B, 4, 4, now)
    assert desk.due(now + GATHER_S + 0.01) == (B,)


def seat(epoch=3, incarnation=1, key=KEY):
    lead = Holder("a", incarnation)
    return Seat(lead=lead, epoch=epoch, rank=1, size=2, rendezvous="tcp://127.0.0.1:1", key=key)


@pytest.mark.parametrize(
    ("incarnation", "epoch", "is_later"),
    [(1, 4, True), (1, 3, False), (1, 2, False), (2, 1, True), (0, 9, False)],
)
def test_a_seat_is_taken_only_in_a_later_group(incarnation, epoch, is_later):
    assert seat(epoch, incarnation).follows(seat().place) is is_later


def test_a_word_comes_back_as_it_was_said():
    word = Word(Kind.VERSION, 3, PolicyVersion(7), 1000)
    data = word.to_bytes(KEY)
    assert len(data) == WORD_BYTES
    assert Word.from_bytes(data, seat()) == word
    assert Word.from_bytes(Word(Kind.BEAT, 3).to_bytes(KEY), seat()).version == -1


def test_a_word_of_another_epoch_is_refused():
    with pytest.raises(GroupWordError, match="something of epoch 2 was said in epoch 3"):
        Word.from_bytes(Word(Kind.BEAT, 2).to_bytes(KEY), seat())


@pytest.mark.parametrize("data", [b"", bytes(WORD_BYTES), Word(Kind.BEAT, 3).to_bytes(b"x" * KEY_BYTES)])
def test_a_word_of_somebody_without_the_key_is_refused(data):
    with pytest.raises(GroupWordError, match="does not have the group's key"):
        Word.from_bytes(data, seat())


def test_a_manifest_is_believed_only_with_the_leads_signature():
    data = bytearray(signed(KEY, b"manifest"))
    assert unsigned(KEY, bytes(data)) == b"manifest"
    data[-1] ^= 1
    with pytest.raises(GroupWordError, match="did not sign"):
        unsigned(KEY, bytes(data))


def test_after_a_group_broke_the_first_store_is_relied_on_for_a_while():
    chain = Chain(["a", "b", "c"], suspect_s=1.0)
    chain.rely_on_first(10.0)
    assert chain.upstream(10.9) == "a"
    assert chain.upstream(11.0) == "c"
    chain.suspect("c", 11.0)
    chain.suspect("c", 11.0)
    chain.rely_on_first(11.0)
    assert chain.upstream(12.5) == "b"  # a longer suspicion stays
